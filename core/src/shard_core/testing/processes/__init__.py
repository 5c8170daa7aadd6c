"""Processes to test in: worlds of ranks that live on between tests, and scripts run as users run them."""
