"""Each rank's share of the data, in an order that no world size changes, from a position that can be saved."""

from shard_core.data.loader import ShardedLoader
from shard_core.data.rounds import DrawnRounds
from shard_core.data.sampler import ResumableSampler
from shard_core.data.transfer import move

__all__ = ["DrawnRounds", "ResumableSampler", "ShardedLoader", "move"]
