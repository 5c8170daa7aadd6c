"""Every option is declared, what cannot be honoured is refused, and what can is read back from the engine."""

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import InvalidOption, SetupError, UnsupportedPrecision, get_strategy
from shard_core.plugins import options_of
from shard_deepspeed._versions import _COORDINATED
from shard_deepspeed.config import DeepSpeedConfig
from shard_deepspeed.config.inert import STAGES
from shard_deepspeed.config.unsupported import UnsupportedOptions
from shard_deepspeed.engine_config import check_honoured

_LATER = {option.name: option.default for option in options_of(UnsupportedOptions)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "stage is 4; give 0, 1, 2 or 3"),
        ({"stage": True}, "stage is True"),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size is 0; give a number of elements from 1 up"),
        ({"overlap_comm": None}, "overlap_comm is None; give True or False"),
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


def test_stage_0_with_16_bit_parameters_is_refused_by_name() -> None:
    for precision in ("bf16-true", "16-true"):
        with pytest.raises(UnsupportedPrecision, match=f"at stage 0 does not honour precision '{precision}'"):
            get_strategy("deepspeed", stage=0, precision=precision)
    assert get_strategy("deepspeed", stage=0, precision="bf16-mixed").precision.policy.parameter == "float32"


_OTHER: dict[str, Any] = {
    "contiguous_gradients": False,
    "overlap_comm": False,
    "reduce_scatter": False,
    "reduce_bucket_size": 50,
    "sub_group_size": 50,
    "param_persistence_threshold": 7,
    "prefetch_bucket_size": 0,
    "max_live_parameters": 9,
    "max_reuse_distance": 0,
    "zero_allow_untested_optimizer": False,
}
_READ_BACK = [name for name in STAGES if name != "zero_allow_untested_optimizer"]  # that is looked at here


def other_than_default(stage: int) -> dict[str, Any]:
    """Change every option that acts at a stage, but for one that would contradict another."""
    return {
        name: _OTHER[name] for name in _READ_BACK if stage in STAGES[name] and (name, stage) != ("reduce_scatter", 3)
    }


@pytest.mark.parametrize("name", _OTHER)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_option_that_does_nothing_at_a_stage_is_warned_of_by_name(
    caplog: pytest.LogCaptureFixture, stage: int, name: str
) -> None:
    with get_strategy("deepspeed", stage=stage, **{name: _OTHER[name]}) as strategy:
        strategy.setup_environment()
    acts = "stage 3 alone" if STAGES[name] == (3,) else "stages 1, 2 and 3"
    warned = [f"{name} is {_OTHER[name]}, which does nothing at stage {stage}: it acts at {acts}."]
    assert caplog.messages == ([] if stage in STAGES[name] else warned)


def test_one_of_two_options_does_nothing_beside_the_other() -> None:
    with pytest.raises(InvalidOption, match="reduce_scatter and contiguous_gradients are False, and at stage 3"):
        DeepSpeedConfig(stage=3, reduce_scatter=False, contiguous_gradients=False)


@contextlib.contextmanager
def engine_of(options: dict[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    with get_strategy("deepspeed", **options) as strategy:
        module = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4))
        model, (optimizer,) = strategy.setup_module_and_optimizers(
            module, [torch.optim.SGD(module.parameters(), lr=0.1)]
        )
        yield strategy, strategy._zero[module].engine, (model, optimizer)  # type: ignore[attr-defined]


def read_back(options: dict[str, Any]) -> list[str]:
    """Set each option's contrary, and check that the engine's part is found to do otherwise."""
    with engine_of(options) as (strategy, engine, _):
        stage = options["stage"]
        found = []
        for name in ("stage", *(name for name in _READ_BACK if stage in STAGES[name])):
            value = (stage + 1) % 4 if name == "stage" else getattr(strategy.config, name)
            wrong = copy.copy(strategy.config)
            contrary = value if name == "stage" else (not value) if isinstance(value, bool) else value + 2
            object.__setattr__(wrong, name, contrary)  # some could not be asked for at once
            try:
                check_honoured(engine, wrong)
            except SetupError as error:
                found += [name] * (f"{name} is" in str(error))
        return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("changed", [False, True])
def test_options_are_read_back_from_the_engine(worlds: Any, stage: int, changed: bool) -> None:
    expected = ["stage", *(name for name in _READ_BACK if stage in STAGES[name])]
    if stage == 3:
        expected.remove("overlap_comm")  # by a stream of its own, and CPUs have none
    options = other_than_default(stage) if changed else {}
    assert worlds(1).run(read_back, {"stage": stage, **options}) == [expected]


def change_parts(stage: int) -> list[str]:
    """Change what acts and leave the configuration as it was, as an engine would that does not listen."""
    with engine_of({"stage": stage}) as (strategy, engine, _):
        zero = engine.optimizer
        parts = {name: zero for name in STAGES if hasattr(zero, name)}
        attributes = {name: name for name in parts}
        if stage == 3:
            parts["param_persistence_threshold"] = zero.parameter_offload
            attributes["param_persistence_threshold"] = "param_numel_persistence_threshold"
            for name, theirs in _COORDINATED.items():
                parts[name] = zero.parameter_offload.get_param_coordinator()
                attributes[name] = f"_PartitionedParameterCoordinator__{theirs}"
        found = []
        for name, part in parts.items():
            before = getattr(part, attributes[name])
            setattr(part, attributes[name], not before if isinstance(before, bool) else before + 1)
            try:
                check_honoured(engine, strategy.config)
            except SetupError as error:
                found += [name] * (f"{name} is" in str(error))
            setattr(part, attributes[name], before)
        return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_read_back_is_what_acts_and_no_echo(worlds: Any, stage: int) -> None:
    expected = [name for name in _READ_BACK if stage in STAGES[name] and (name, stage) != ("overlap_comm", 3)]
    assert worlds(1).run(change_parts, stage) == [expected]


def messages(options: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Count what travels in the second step, by operation and sizes, as torch's own profiler sees it."""
    with engine_of(options) as (strategy, _, (model, optimizer)):
        for _ in range(2):
            with torch.profiler.profile(record_shapes=True) as profile:
                strategy.backward(model(torch.ones(2, 4)).sum(), model)
                strategy.optimizer_step(optimizer)
                optimizer.zero_grad()
        sent = [(event.name, str(event.input_shapes)) for event in profile.events() if event.name.startswith("c10d::")]
        return dict(Counter(sent))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sizes_change_what_travels(worlds: Any, stage: int) -> None:
    usual = worlds(2).run(messages, {"stage": stage})[0]
    assert worlds(2).run(messages, {"stage": stage})[0] == usual
    for name in {"reduce_bucket_size", "param_persistence_threshold"} & other_than_default(stage).keys():
        assert worlds(2).run(messages, {"stage": stage, name: _OTHER[name]})[0] != usual, name


class Layers(nn.Module):
    """Equal layers one after another, and what each finds whole of all of them when it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))
        self.weights = [layer.weight for layer in self.layers]  # to ask a layer for it would gather it
        self.whole: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
            self.whole.append(sum(each.ds_status.name != "NOT_AVAILABLE" for each in self.weights))  # type: ignore[union-attr]
        return inputs


def gathered(options: dict[str, Any]) -> tuple[list[int], int]:
    """Return how many layers were gathered as each one of a later forward had run, and how often one was gathered."""
    with get_strategy("deepspeed_stage_3", param_persistence_threshold=0, **options) as strategy:
        torch.manual_seed(1)
        module = Layers()
        model, (optimizer,) = strategy.setup_module_and_optimizers(
            module, [torch.optim.SGD(module.parameters(), lr=0.1)]
        )
        for step in range(4):  # DeepSpeed learns the order of layers in the first ones
            module.whole.clear()
            with torch.profiler.profile() as profile:
                strategy.backward(model(torch.ones(2, 8)).sum(), model)
            if step < 3:
                strategy.optimizer_step(optimizer)
                optimizer.zero_grad()
        return module.whole, sum("allgather" in event.name for event in profile.events())


_LAYER = 64


@pytest.mark.parametrize(
    ("options", "whole", "messages"),
    [
        ({}, [0, 0, 0, 0, 0], 10),  # each is gathered for its forward and for its backward
        ({"prefetch_bucket_size": _LAYER}, [1, 1, 1, 1, 2], 9),
        ({"prefetch_bucket_size": 4 * _LAYER, "max_live_parameters": _LAYER}, [0, 0, 0, 0, 0], 10),
        ({"prefetch_bucket_size": 4 * _LAYER, "max_live_parameters": 3 * _LAYER}, [2, 2, 2, 3, 3], 6),
        ({"max_reuse_distance": _LAYER}, [0, 0, 0, 0, 1], 9),
        ({"max_reuse_distance": 3 * _LAYER}, [0, 0, 0, 1, 2], 8),
    ],
)
def test_stage_3_gathers_ahead_and_keeps_whole_as_its_options_say(
    worlds: Any, options: dict[str, Any], whole: list[int], messages: int
) -> None:
    one_by_one = {"prefetch_bucket_size": 0, "max_reuse_distance": 0}
    assert worlds(2).run(gathered, {**one_by_one, **options}) == [(whole, messages)] * 2


def refuses_untested(stage: int) -> list[str]:
    refused = []
    with get_strategy("deepspeed", stage=stage, zero_allow_untested_optimizer=False) as strategy:
        for kind in (torch.optim.AdamW, torch.optim.SGD):
            module = nn.Linear(4, 4)
            try:
                strategy.setup_module_and_optimizers(module, [kind(module.parameters(), lr=0.1)])
            except SetupError as error:
                refused.append(str(error))
                assert type(module.weight) is nn.Parameter
                assert not vars(module.weight), "nothing has begun"
        late = nn.Linear(4, 4)
        model = strategy.setup_module(late)
        try:
            strategy.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        except SetupError as error:
            refused.append(str(error))
    return refused


@pytest.mark.parametrize("stage", [1, 3])
def test_untested_optimizers_are_refused_where_users_want_none(worlds: Any, stage: int) -> None:
    (refused,) = worlds(1).run(refuses_untested, stage)
    assert len(refused) == 2
    for sentence in refused:
        assert sentence.startswith("SGD is no optimizer that DeepSpeed lists as tested with ZeRO, and zero_allow")
        assert "AdamW" in sentence
