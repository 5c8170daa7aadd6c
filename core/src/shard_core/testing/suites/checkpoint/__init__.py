"""Promises about checkpoints: one format that every strategy and world size reads, bit for bit."""
