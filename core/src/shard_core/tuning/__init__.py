"""Measuring which settings of a strategy train the user's own model fastest: trials, rounds, search, verdict."""
