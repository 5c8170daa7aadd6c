"""Writes programs as Python: what their ranks run and what people read."""
