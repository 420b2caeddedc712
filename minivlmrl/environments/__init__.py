"""Tools that a completion calls while it is written, and the sampler that answers."""
