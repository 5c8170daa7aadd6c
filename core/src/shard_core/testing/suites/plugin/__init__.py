"""Promises about a backend as it is found, asked and built, before any rank runs."""
