"""Generate answers with a trained model: for one prompt (chat), a data file (evaluate, generate) or a page (serve)."""
