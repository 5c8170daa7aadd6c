"""``xla_fsdp`` and ``xla_spmd`` keep every promise of the contract."""

import pytest
from xla_environments import HASTY, spread_over

from shard_core.testing import Conformance


class TestXLAFSDP(Conformance):
    strategy = "xla_fsdp"
    options = {"collectives": "host"}
    device = "xla"
    environment = HASTY
    patience = 4.0
    world_sizes = (2,)


@pytest.mark.long
class TestXLAFSDPAtOtherSizes(Conformance):
    strategy = "xla_fsdp"
    options = {"collectives": "host"}
    device = "xla"
    environment = HASTY
    patience = 4.0
    world_sizes = (1, 3)


@pytest.mark.long
class TestXLASPMDOnOneDevice(Conformance):
    strategy = "xla_spmd"
    device = "xla"
    world_sizes = (1,)
    environment = spread_over(1)
    patience = 4.0


class TestXLASPMDOnFourDevices(Conformance):
    strategy = "xla_spmd"
    device = "xla"
    world_sizes = (1,)
    environment = spread_over(4)
    patience = 4.0
