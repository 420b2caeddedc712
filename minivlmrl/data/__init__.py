"""FILES -> TOKENS AND PATCHES: images, chat template, tokenizer, datasets, the embedded task."""
