"""LOG-PROBABILITIES -> LOSS -> STEP: losses, algorithms, the loop's parts."""
