"""What is measured rather than tested. A package, as others install one of this name."""
