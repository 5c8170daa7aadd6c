"""Every option is declared, what cannot be honoured is refused, and what can is read back from the engine."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.errors import InvalidOption, SetupError, UnsupportedPrecision
from shard_core.options import options_of
from shard_deepspeed.config import DeepSpeedConfig
from shard_deepspeed.config.later import LaterOptions
from shard_deepspeed.settings import check_honoured

_LATER = {option.name: option.default for option in options_of(LaterOptions)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "stage is 4; give 0, 1, 2 or 3"),
        ({"stage": True}, "stage is True"),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size is 0; give a number of elements from 1 up"),
        ({"allgather_bucket_size": 3}, "allgather_bucket_size is 3; DeepSpeed wants an even number"),
        ({"overlap_comm": None}, "overlap_comm is None; give True or False"),
        ({"logging_batch_size_per_gpu": 0}, "logging_batch_size_per_gpu is 0"),
        ({"logging_level": "INFO"}, "logging_level is 'INFO'"),
        ({"reduce_bucketsize": 1}, "has no option 'reduce_bucketsize'; did you mean 'reduce_bucket_size'"),
    ],
)
def test_wrong_options_get_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        get_strategy("deepspeed", **options)


@pytest.mark.parametrize("name", _LATER)
def test_what_is_not_honoured_is_refused_and_never_swallowed(name: str) -> None:
    default = _LATER[name]
    assert DeepSpeedConfig(**{name: default}) == DeepSpeedConfig()
    other: Any = (not default) if isinstance(default, bool) else (default or 0) + 1 if default != str(default) else "x"
    other = "nvme" if default is None else other
    with pytest.raises(InvalidOption, match=f"{name} is .*leave it at"):
        DeepSpeedConfig(**{name: other})


def test_a_name_stands_for_its_stage() -> None:
    with pytest.raises(InvalidOption, match="stage is 1, but strategy 'deepspeed_stage_2' stands for stage=2"):
        get_strategy("deepspeed_stage_2", stage=1)
    with pytest.raises(InvalidOption, match="zero_optimization is False, but"):
        get_strategy("deepspeed_stage_2", zero_optimization=False)


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_stage_3"])
def test_options_that_contradict_each_other_are_refused(name: str) -> None:
    with pytest.raises(InvalidOption, match="zero_optimization is False and stage is 3, which shards"):
        get_strategy(name, zero_optimization=False, **({"stage": 3} if name == "deepspeed" else {}))


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_float16_is_refused_by_name(precision: str) -> None:
    with pytest.raises(UnsupportedPrecision, match=precision):
        get_strategy("deepspeed_stage_2", precision=precision)


def test_stage_0_with_16_bit_parameters_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedPrecision, match="at stage 0 does not honour precision 'bf16-true'"):
        get_strategy("deepspeed", stage=0, precision="bf16-true")
    assert get_strategy("deepspeed", stage=0, precision="bf16-mixed").precision.policy.parameter == "float32"


_OTHER = {
    "contiguous_gradients": False,
    "overlap_comm": False,
    "reduce_scatter": False,
    "allgather_bucket_size": 4096,
    "reduce_bucket_size": 5000,
    "sub_group_size": 50,
    "param_persistence_threshold": 7,
    "logging_batch_size_per_gpu": 3,
    "logging_level": 40,
}


def read_back(options: dict[str, Any]) -> list[str]:
    with get_strategy("deepspeed", **options) as strategy:
        module = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4))
        strategy.setup_module_and_optimizers(module, [torch.optim.SGD(module.parameters(), lr=0.1)])
        engine = strategy._zero[module].engine  # type: ignore[attr-defined]
        seen = []
        for field in dataclasses.fields(DeepSpeedConfig):
            wrong: Any = {"logging_batch_size_per_gpu": 99, "stage": (options["stage"] + 1) % 4}.get(field.name)
            value = getattr(strategy.config, field.name)
            if field.name in _LATER or field.name in ("zero_optimization", "logging_level"):
                continue
            wrong = wrong if wrong is not None else (not value) if isinstance(value, bool) else value + 2
            with pytest.raises(SetupError, match=field.name):
                check_honoured(engine, dataclasses.replace(strategy.config, **{field.name: wrong}))
            seen.append(field.name)
        return seen


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("options", [{}, _OTHER])
def test_options_are_read_back_from_the_engine(worlds: Any, stage: int, options: dict[str, Any]) -> None:
    expected = ["stage", *(name for name in _OTHER if name != "logging_level")]
    for seen in worlds(1).run(read_back, {"stage": stage, **options}):
        assert sorted(seen) == sorted(expected)
