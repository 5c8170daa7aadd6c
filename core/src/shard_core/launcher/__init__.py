"""Who runs: joining ranks that exist, or starting them on this host."""
