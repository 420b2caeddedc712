"""Write rows of other projects' layouts in the one form that a run reads, or the other way round."""
