"""Every option of upstream is declared; what is not there yet is refused, never swallowed."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from shard_core import InvalidOption
from shard_core.plugins import options_of
from shard_xla.config import XLAFSDPConfig, XLASPMDConfig


def test_all_of_upstreams_keywords_are_declared_with_its_defaults_but_for_rows() -> None:
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    upstream = inspect.signature(XlaFullyShardedDataParallel.__init__).parameters
    theirs = {
        name: each.default for name, each in upstream.items() if name not in ("self", "module") and name[0] != "_"
    }
    ours = {option.name: option.default for option in options_of(XLAFSDPConfig)}
    assert {name: ours.get(name, "missing") for name in theirs} == {**theirs, "shard_param_on_dim_0": True}


@pytest.mark.parametrize(
    "options",
    [
        {"sequential_save": True},
        {"flatten_parameters": True},
        {"compute_dtype": torch.bfloat16},
        {"buffer_dtype": torch.float32},
        {"fp32_reduce_scatter": True},
        {"sharding_groups": [[0]]},
        {"sharding_rank": 0},
        {"sharding_world_size": 1},
        {"pin_layout_in_collective_ops": False},
        {"auto_wrapper_callable": nn.Linear},
        {"param_init_fn": print},
    ],
)
def test_what_is_not_there_yet_says_so(options: dict[str, object]) -> None:
    with pytest.raises(InvalidOption, match=f"{next(iter(options))}=.* is not there yet") as error:
        XLAFSDPConfig(**options)
    assert str(error.value).count("leave it") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"coalesce_all_gather_ops": True, "shard_param_on_dim_0": False}, "shard_param_on_dim_0=True"),
        ({"auto_wrap_policy": {"Block"}}, "module classes"),
        ({"auto_wrap_policy": nn.Linear}, "a set of module classes"),
        ({"activation_checkpointing_policy": nn.Linear}, "a set of module classes"),
        ({"state_dict_type": "whole"}, "'sharded' or 'full'"),
        ({"reduce_scatter_bucket_size_mb": -1}, "whole number of MiB"),
        ({"reshard_after_forward": "yes"}, "True or False"),
    ],
)
def test_nonsense_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        XLAFSDPConfig(**options)


@pytest.mark.parametrize("options", [{"virtual_devices": 0}, {"extra_data_axis": "dcn"}, {"shard_output": 3}])
def test_spmd_refuses_nonsense(options: dict[str, object]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        XLASPMDConfig(**options)
