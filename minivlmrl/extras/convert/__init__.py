"""Convert rows from the layouts of other projects to the one form that a run reads, or back."""
