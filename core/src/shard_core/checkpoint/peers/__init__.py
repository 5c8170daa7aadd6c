"""Weights that other libraries have written, read straight into shards."""
