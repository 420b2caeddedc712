"""Low-rank adapters, frozen weights packed in 4 bits, AdamW with moments of 8 bits."""
