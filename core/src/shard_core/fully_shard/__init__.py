"""Sharding modules with torch's ``fully_shard`` (FSDP2): the sharder, units, deferred sync, entry methods, gloo."""
