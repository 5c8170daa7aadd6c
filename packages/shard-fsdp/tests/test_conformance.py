"""The strategies of this package keep every promise of the contract."""

import pytest

from shard_core.testing import Conformance


class TestFSDP(Conformance):
    strategy = "fsdp"
    world_sizes = (2,)


@pytest.mark.long
class TestFSDPAtOtherSizes(Conformance):
    strategy = "fsdp"
    world_sizes = (1, 3, 4)


@pytest.mark.long
class TestHSDP(Conformance):
    """On two ranks there is one copy, on four there are two."""

    strategy = "hsdp"
    options = {"device_mesh": ("auto", 2)}
    world_sizes = (2, 4)


@pytest.mark.long
class TestOffload(Conformance):
    strategy = "fsdp_cpu_offload"
    world_sizes = (2,)
