"""From the live state to a committed checkpoint, at once or asynchronously."""
