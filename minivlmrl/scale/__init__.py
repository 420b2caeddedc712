"""Many processes: ranks, sharded weights, and folders of models in and out."""
