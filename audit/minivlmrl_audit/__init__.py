"""Find out whether a trainer is right: compute a step of it again, and name the mistake."""
