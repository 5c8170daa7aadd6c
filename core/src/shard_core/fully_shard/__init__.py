"""Sharding modules with torch's ``fully_shard`` (FSDP2), for every engine that uses it."""
