"""Promises about training: the same losses, gradients and weights on every engine."""
