"""What a completion may ask for while it is written: tools, and the sampler that answers them."""
