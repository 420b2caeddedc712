"""Hugging Face folders: config.json, weights, tokenizer, image settings."""
