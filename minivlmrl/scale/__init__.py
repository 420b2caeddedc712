"""Many processes: ranks, sharded weights, states to resume from."""
