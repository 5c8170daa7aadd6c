"""Where checkpoints are kept: folders on a disk, and prefixes in an object store, through one interface."""
