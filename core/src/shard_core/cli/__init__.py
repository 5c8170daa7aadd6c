"""The ``shard`` command: one module per verb; reaches no torch until a verb needs it."""
