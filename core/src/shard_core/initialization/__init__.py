"""Building modules without the memory of their values, and giving them the values a plain build has."""
