"""Which dtype where."""
