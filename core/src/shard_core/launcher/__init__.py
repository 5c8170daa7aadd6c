"""Launchers: joining the ranks that exist, or starting them on this host, watching them and naming what failed."""
