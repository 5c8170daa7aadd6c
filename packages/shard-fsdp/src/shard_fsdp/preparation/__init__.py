"""What is done to a model before it is sharded: which of its parts are units, which stay whole, how layers run."""
