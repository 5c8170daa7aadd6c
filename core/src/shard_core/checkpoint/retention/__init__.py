"""Which checkpoints of a run stay, and how the others are removed."""
