"""Convert rows of training data from the layouts of other projects to ours, or back."""
