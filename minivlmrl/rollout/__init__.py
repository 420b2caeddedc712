"""PROMPTS -> COMPLETIONS, REWARDS, ADVANTAGES: sampling and judging."""
