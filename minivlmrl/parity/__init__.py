"""Parity on demand: every loss of ours against the TRL that is installed. Run `python -m minivlmrl.parity`."""
