"""Writes programs as Python, which is what their ranks run and what people read, and as JSON."""
