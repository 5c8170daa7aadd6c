"""The parity check on a user's own model: its recipe, runs under a strategy and in plain PyTorch, and the verdict."""
