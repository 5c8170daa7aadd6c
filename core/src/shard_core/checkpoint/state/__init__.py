"""What a rank holds: the live state as boxes of full tensors, by name."""
