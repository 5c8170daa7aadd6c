"""Promises about ranks that talk: what they reduce and gather, what they hand out, and where they meet."""
