"""Convert training data from other projects' formats."""
