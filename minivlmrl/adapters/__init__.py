"""Low-rank adapters, weights packed in 4 bits under them, AdamW with moments of 8 bits."""
