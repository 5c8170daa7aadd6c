"""From a checkpoint into the live state: matched and verified before anything is touched."""
