"""What `python -m minivlmrl TOOL` starts."""
