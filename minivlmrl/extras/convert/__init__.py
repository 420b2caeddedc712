"""Convert training data between minivlmrl's layout and those of other projects."""
