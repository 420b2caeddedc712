"""TOKENS AND PATCHES -> LOG-PROBABILITIES: Qwen2.5-VL and the group forward."""
