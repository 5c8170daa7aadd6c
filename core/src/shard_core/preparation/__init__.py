"""What is done to a module around an engine: how its layers run, which submodules are meant, what it refuses after."""
