"""Convert rows of training data between minivlmrl's layout and the layouts of other projects."""
