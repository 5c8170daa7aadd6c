"""``single`` and ``ddp`` keep every promise of the contract."""

from shard_core.testing import Conformance


class TestSingle(Conformance):
    strategy = "single"


class TestDDP(Conformance):
    strategy = "ddp"
