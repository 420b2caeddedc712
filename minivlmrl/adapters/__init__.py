"""Low-rank adapters: from outside, PEFT's files both ways, merge."""
