"""``zero1`` keeps every promise of the contract."""

from shard_core.testing import Conformance


class TestZero1(Conformance):
    strategy = "zero1"
