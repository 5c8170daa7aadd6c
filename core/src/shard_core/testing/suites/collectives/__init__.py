"""Promises about collectives: what ranks reduce and gather, what they broadcast, and how they wait."""
