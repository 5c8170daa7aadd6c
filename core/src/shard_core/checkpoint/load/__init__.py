"""From a checkpoint into the live state: compared and verified before anything is touched."""
