"""Run a recipe: set up the model, train, evaluate, log metrics and save states."""
