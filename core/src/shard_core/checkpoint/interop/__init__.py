"""Interop: weights in the formats of other libraries, read straight into shards, and written for them."""
