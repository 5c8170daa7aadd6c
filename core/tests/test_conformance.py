"""``single`` and ``ddp`` keep every promise of the contract."""

import pytest

from shard_core.testing import Conformance


class TestSingle(Conformance):
    strategy = "single"


class TestDDP(Conformance):
    strategy = "ddp"
    world_sizes = (2,)


@pytest.mark.long
class TestDDPAtOtherSizes(Conformance):
    strategy = "ddp"
    world_sizes = (1, 3)
