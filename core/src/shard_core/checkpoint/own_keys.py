"""The keys under which a strategy keeps state of its own in a checkpoint, beside the user's."""

#: What they begin with; users' keys may not.
OWN_KEYS = "shard_"

#: Where the random number generators of all ranks stood. It is how a run stands, not what it has learned.
RANDOM_KEY = f"{OWN_KEYS}random"

#: What the keys of their tensors begin with.
RANDOM_TENSORS = f"state.{RANDOM_KEY}."
