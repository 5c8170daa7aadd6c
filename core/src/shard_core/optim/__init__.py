"""Optimizers over shards: which may step them, with which kernel, and the step on this rank's shards."""
