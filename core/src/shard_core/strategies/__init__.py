"""The built-in strategies, which come in by the same door as strangers."""
