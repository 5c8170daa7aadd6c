"""Data parallel: whole copies of a module on every rank, whose gradients are averaged."""
