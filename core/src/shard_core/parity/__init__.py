"""The parity check on a model of the user's own: what a strategy makes of it against plain PyTorch."""
