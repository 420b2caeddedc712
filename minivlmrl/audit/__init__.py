"""Our numbers held against TRL's."""
