"""``fsdp`` keeps every promise of the contract."""

from shard_core.testing import Conformance


class TestFSDP(Conformance):
    strategy = "fsdp"
