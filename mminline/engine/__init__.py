"""What acts around the models during a run: hooks, optimiser wrappers and their constructors."""
