"""What is done to a module before an engine shards or wraps it: how its layers run, and which submodules are meant."""
