"""``xla_fsdp`` and ``xla_spmd`` keep every promise of the contract."""

import pytest
from xla_environments import HASTY, spread_over

from shard_core.testing import Conformance

_DRAWN = {
    "weights_can_be_drawn_anew": "XLA draws from a generator of its own, and shards of flat parameters one by one"
}
_FLAT = {
    **_DRAWN,
    "data_written_in_forward_count": "torch_xla makes what forwards read anew from flat shards, and minds no writes",
    "borrowed_parameters_count": "torch_xla makes what forwards read anew from flat shards, whatever stands there",
}


class TestXLAFSDP(Conformance):
    strategy = "xla_fsdp"
    options = {"collectives": "host"}
    device = "xla"
    environment = HASTY
    patience = 4.0
    world_sizes = (2,)
    known_failures = _FLAT


@pytest.mark.long
class TestXLAFSDPAtOtherSizes(Conformance):
    strategy = "xla_fsdp"
    options = {"collectives": "host"}
    device = "xla"
    environment = HASTY
    patience = 4.0
    world_sizes = (1, 3)
    known_failures = _FLAT


@pytest.mark.long
class TestXLASPMDOnOneDevice(Conformance):
    strategy = "xla_spmd"
    device = "xla"
    world_sizes = (1,)
    environment = spread_over(1)
    patience = 4.0
    known_failures = _DRAWN


@pytest.mark.long  # in every run it is held to plain PyTorch by random programs
class TestXLASPMDOnFourDevices(Conformance):
    strategy = "xla_spmd"
    device = "xla"
    world_sizes = (1,)
    environment = spread_over(4)
    patience = 4.0
    known_failures = _DRAWN
