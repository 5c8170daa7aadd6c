"""Deferred initialization: constructors are recorded without the memory of values, and replayed shard by shard."""
