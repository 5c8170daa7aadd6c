"""Measuring which of a strategy's settings train the user's own model fastest."""
