"""What goes wrong silently with XLA's wrappers elsewhere, and does not here."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from xla_environments import HASTY, spread_over

from shard_core import InvalidOption, LaunchError, RankFailed, SetupError, get_strategy
from shard_core.testing import models, oracle, set_up, step, whole_weights

STEPS = 3


def options(**more: Any) -> dict[str, Any]:
    return {"name": "xla_fsdp", "accelerator": "xla"} | more


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.tanh(self.linear(inputs)) * self.scale


class Blocks(nn.Module):
    """Three blocks, of which the first and the last share a weight if they are tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 3)
        if tied:
            self.blocks[2].linear.weight = self.blocks[0].linear.weight

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return nn.functional.mse_loss(self.head(inputs), targets)


def tied_blocks() -> nn.Module:
    return Blocks(tied=True)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)


def train(make: Any, chosen: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], int]:
    with get_strategy(**chosen) as strategy:
        model, optimizer = set_up(strategy, make, sgd)
        losses = [step(strategy, model, optimizer, batch) for batch in models.batches("plain", STEPS, 12)]
        units = sum(type(part).__name__.endswith("FullyShardedDataParallel") for part in model.modules())
        return losses, whole_weights(strategy, model), units


UNITS = [
    (Blocks, {"auto_wrap_policy": {Block}}, 4),
    (tied_blocks, {"auto_wrap_policy": {Block}}, 2),  # both owners of the tie stay with the root
    (Blocks, {"auto_wrap_policy": {Block}, "activation_checkpointing_policy": {Block}}, 4),
    (Blocks, {"activation_checkpointing_policy": {Block}}, 1),  # recomputed though no units
    (Blocks, {"auto_wrap_policy": {Block}, "activation_checkpointing_policy": {nn.Linear}}, 4),  # inside units
    (tied_blocks, {"auto_wrap_policy": {Block}, "activation_checkpointing_policy": {Block}}, 2),
]


def assert_like_plain(answers: list[Any], make: Any, units: int) -> None:
    truth = oracle.train(make, sgd, models.batches("plain", STEPS, 12))
    for losses, weights, found in answers:
        assert found == units
        oracle.assert_same_numbers("loss", losses, truth.losses, 1e-6)
        assert weights.keys() == truth.weights.keys()
        oracle.assert_same_weights(weights, truth.weights, 1e-5)


@pytest.mark.parametrize(("make", "chosen", "units"), UNITS)
def test_units_train_like_plain_pytorch(worlds: Any, make: Any, chosen: dict[str, Any], units: int) -> None:
    assert_like_plain(worlds(2, HASTY).run(train, make, options(**chosen), timeout=240), make, units)


def with_nothing() -> nn.Module:
    model = Blocks()
    model.nothing = nn.Parameter(torch.empty(0, 3))
    return model


@pytest.mark.parametrize(("make", "chosen", "units"), [*UNITS, (with_nothing, {"auto_wrap_policy": {Block}}, 4)])
def test_spread_units_train_like_plain_pytorch(worlds: Any, make: Any, chosen: dict[str, Any], units: int) -> None:
    arguments = {"name": "xla_spmd", "accelerator": "xla", **chosen}
    assert_like_plain(worlds(1, spread_over(4)).run(train, make, arguments, timeout=240), make, units)


def count_forwards(chosen: dict[str, Any]) -> list[int]:
    """Count how often each block computes in one step."""
    calls: list[int] = []

    def counted() -> nn.Module:
        module = Blocks()
        for place, block in enumerate(module.blocks):
            block.linear.register_forward_pre_hook(lambda *_, place=place: calls.append(place))
        return module

    with get_strategy(**chosen) as strategy:
        model, optimizer = set_up(strategy, counted, sgd)
        step(strategy, model, optimizer, models.batches("plain", 1, 12)[0])
        return [calls.count(place) for place in range(3)]


@pytest.mark.parametrize("wrapped", [None, {Block}, {nn.Linear}])
@pytest.mark.parametrize("name", ["xla_fsdp", "xla_spmd"])
def test_layers_compute_again_in_backward_whatever_the_units(worlds: Any, name: str, wrapped: Any) -> None:
    """The first of them, too, which is given data alone, whose gradients nobody wants."""
    chosen = options(name=name, auto_wrap_policy=wrapped, activation_checkpointing_policy={Block})
    world = worlds(1, spread_over(4)) if name == "xla_spmd" else worlds(2, HASTY)
    if (name, wrapped) == ("xla_fsdp", {nn.Linear}):
        with pytest.raises(RankFailed, match="activation_checkpointing_policy names Block, which holds units"):
            world.run(count_forwards, chosen, timeout=240)
    else:
        assert all(counts == [2, 2, 2] for counts in world.run(count_forwards, chosen, timeout=240))


@pytest.mark.parametrize("option", ["auto_wrap_policy", "activation_checkpointing_policy"])
@pytest.mark.parametrize("name", ["xla_fsdp", "xla_spmd"])
def test_a_class_that_the_model_lacks_is_an_error(worlds: Any, name: str, option: str) -> None:
    world = worlds(1, spread_over(4) if name == "xla_spmd" else HASTY)
    with pytest.raises(RankFailed, match=f"InvalidOption: {option} names Bilinear, of which the model has none"):
        world.run(count_forwards, options(name=name, **{option: {nn.Bilinear}}))
    with pytest.raises(RankFailed, match=f"InvalidOption: {option} names ModuleList, which has no forward"):
        world.run(count_forwards, options(name=name, **{option: {nn.ModuleList}}))


def with_a_scalar() -> nn.Module:
    """Make one of three units hold a parameter without dims."""
    model = Blocks()
    model.blocks[1].scale = nn.Parameter(torch.tensor(0.5))
    return model


@pytest.mark.parametrize(
    "chosen",
    [
        {"coalesce_all_gather_ops": True},
        {"shard_param_on_dim_0": False},
        {"reshard_after_forward": False, "disable_reshard_on_root": False, "reduce_scatter_bucket_size_mb": 1},
        {"sync_on_finalization": True, "execute_sharding_on_init": False, "optimization_barrier_in_backward": False},
    ],
)
def test_upstreams_options_do_not_change_the_result(worlds: Any, chosen: dict[str, Any]) -> None:
    arguments = options(auto_wrap_policy={Block}, **chosen)
    assert_like_plain(worlds(2, HASTY).run(train, with_a_scalar, arguments, timeout=240), with_a_scalar, 4)


class Broken(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise ValueError("the file of sample 5 is cut short")
        return torch.full((2,), float(index))


def read_what_is_broken() -> None:
    with get_strategy(**options()) as strategy:
        for _ in strategy.process_dataloader(DataLoader(Broken(), batch_size=2)):
            pass


def test_a_data_sets_exception_ends_the_loop(worlds: Any) -> None:
    with pytest.raises(RankFailed, match="the file of sample 5 is cut short"):
        worlds(1, HASTY).run(read_what_is_broken)


def forget_nothing() -> list[float]:
    """Evaluate after the backward: upstream would keep those whole weights for the next training forward."""
    with get_strategy(**options()) as strategy:
        model, optimizer = set_up(strategy, "plain", sgd)
        losses = []
        for batch in models.batches("plain", STEPS, 12):
            share = models.share_of(strategy, batch)
            loss = model(*share)
            strategy.backward(loss, model)
            with torch.no_grad():
                model(*share)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(float(strategy.all_reduce(loss.detach())))
        return losses


def test_evaluation_before_the_step_leaves_no_old_weights(worlds: Any) -> None:
    truth = oracle.train(lambda: models.make("plain"), sgd, models.batches("plain", STEPS, 12))
    for losses in worlds(2, HASTY).run(forget_nothing, timeout=240):
        oracle.assert_same_numbers("loss", losses, truth.losses, 1e-6)


def shapes_that_never_end(sizes: list[int]) -> list[str]:
    with get_strategy(**options()) as strategy, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = set_up(strategy, "plain", sgd)
        for size in sizes:
            batch = strategy.batch_to_device(models.batches("plain", 1, size)[0])
            strategy.backward(model(*batch), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return [str(each.message) for each in caught if "compiled new graphs" in str(each.message)]


def test_endless_recompilation_is_reported_and_not_at_every_step(worlds: Any) -> None:
    assert worlds(1, HASTY).run(shapes_that_never_end, [4] * 12, timeout=240) == [[]]
    ((warning,),) = worlds(1, HASTY).run(shapes_that_never_end, list(range(4, 18)), timeout=240)
    assert "drop_last=True" in warning


def step_by_hand(chosen: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Step without the strategy, and ask for the weights at once."""
    with get_strategy(**chosen) as strategy:
        model, optimizer = set_up(strategy, "plain", sgd)
        for batch in models.batches("plain", STEPS, 12):
            strategy.backward(model(*models.share_of(strategy, batch)), model)
            optimizer.step()
            optimizer.zero_grad()
        return strategy.module_state_dict(model)


def test_weights_are_whole_while_a_step_is_under_way(worlds: Any) -> None:
    truth = oracle.train(lambda: models.make("plain"), sgd, models.batches("plain", STEPS, 12))
    arguments = {"name": "xla_spmd", "accelerator": "xla"}
    (weights,) = worlds(1, spread_over(4)).run(step_by_hand, arguments, timeout=240)
    oracle.assert_same_weights(weights, truth.weights, 1e-5)


def test_more_ranks_than_one_are_refused_with_the_way_to_more_devices() -> None:
    with pytest.raises(LaunchError, match=r"at most 1 rank, not on 2; .*virtual_devices"):
        get_strategy("xla_spmd", accelerator="xla", devices=2).launch(step_by_hand)


def graph_nodes_of_a_step(chosen: dict[str, Any], clip: bool) -> float:
    """Count the operations that a settled step runs."""
    from torch_xla.debug import metrics

    with get_strategy(**chosen) as strategy:
        model, optimizer = set_up(strategy, "gpt", sgd)
        for _ in range(3):
            metrics.clear_metrics()
            batch = strategy.batch_to_device(models.batches("gpt", 1, 4)[0])
            strategy.backward(model(*batch), model)
            if clip:
                strategy.clip_gradients_norm(model, optimizer, 1.0)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        total: float = metrics.metric_data("TensorsGraphSize")[1]
        return total


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        pytest.param(HASTY, options(), id="xla_fsdp"),
        pytest.param(spread_over(2), {"name": "xla_spmd", "accelerator": "xla"}, id="xla_spmd", marks=pytest.mark.long),
    ],
)
def test_a_look_at_the_norm_computes_nothing_twice(worlds: Any, environment: Any, chosen: dict[str, Any]) -> None:
    (without,) = worlds(1, environment).run(graph_nodes_of_a_step, chosen, False, timeout=240)
    (clipping,) = worlds(1, environment).run(graph_nodes_of_a_step, chosen, True, timeout=240)
    assert without < clipping < 1.7 * without  # above 2 if forward and backward ran again


def devices_of_counters(full: bool) -> set[str]:
    """Step ASGD, which counts on the parameter's device."""
    with get_strategy(**options()) as strategy:
        model, optimizer = set_up(strategy, "plain", lambda module: torch.optim.ASGD(module.parameters(), lr=0.1))
        strategy.backward(model(*models.share_of(strategy, models.batches("plain", 1, 12)[0])), model)
        strategy.optimizer_step(optimizer)
        slots = strategy.optimizer_state_dict(optimizer, full=full)["state"].values()
        return {value.device.type for values in slots for value in values.values()}


def test_full_optimizer_state_is_in_host_memory(worlds: Any) -> None:
    assert worlds(1, HASTY).run(devices_of_counters, True) == [{"cpu"}]
    assert worlds(1, HASTY).run(devices_of_counters, False) == [{"cpu", "xla"}]


def set_up_on_the_device() -> None:
    with get_strategy(**options()) as strategy:
        model = models.make("gpt").to(strategy.root_device)
        strategy.setup_module(model)


def test_a_module_that_was_moved_is_refused(worlds: Any) -> None:
    with pytest.raises(RankFailed, match=r"leave the module on the CPU.*untie"):
        worlds(1, HASTY).run(set_up_on_the_device)


def start(chosen: dict[str, Any]) -> str:
    try:
        with get_strategy(**chosen):
            return "started"
    except SetupError as error:
        return str(error)


def test_the_modes_of_a_process_do_not_mix(worlds: Any) -> None:
    assert worlds(1, HASTY).run(start, options()) == ["started"]
    (message,) = worlds(1, HASTY).run(start, {"name": "xla_spmd", "accelerator": "xla"})
    assert "has not used XLA before" in message
    (message,) = worlds(1, spread_over(4)).run(start, {"name": "xla_spmd", "accelerator": "xla", "virtual_devices": 2})
    assert "wants 2 XLA devices, but this process uses 4" in message
    (message,) = worlds(1, spread_over(4)).run(start, options())
    assert "cannot be left" in message


@pytest.mark.parametrize("name", ["xla_fsdp", "xla_spmd"])
def test_cpus_are_not_taken_for_tpus(name: str) -> None:
    with pytest.raises(
        LaunchError, match=r"accelerator is 'tpu', but .* are XLA's CPU devices; pass accelerator='xla'"
    ):
        get_strategy(name, accelerator="tpu")


def kind_of_device(given: dict[str, Any]) -> str:
    with get_strategy("xla_fsdp", **given) as strategy:
        return f"{strategy.root_device} of {strategy.world_size}"


def test_every_rank_has_a_device_of_its_own(worlds: Any) -> None:
    given = {"parallel_devices": ["xla", "xla:0"]}
    assert worlds(2, HASTY).run(kind_of_device, given) == ["xla:0 of 2"] * 2
    with pytest.raises(InvalidOption, match="parallel_devices names xla:1, and a rank sees one xla device only"):
        get_strategy("xla_fsdp", parallel_devices=["xla:0", "xla:1"]).setup_environment()


def test_other_collectives_are_refused() -> None:
    with pytest.raises(InvalidOption, match="it has: 'host'"):
        get_strategy(**options(collectives="process_group"))


def backward_and_start(with_device: bool) -> str:
    import torch_xla  # here, or every test would have it

    if with_device:
        torch_xla.device()
    torch.ones((), requires_grad=True).mul(2.0).backward()
    return start(options())


def test_a_backward_before_there_was_a_device_is_named(worlds: Any) -> None:
    (message,) = worlds(1, {**HASTY, "PJRT_DEVICE": "CPU"}).run(backward_and_start, False, timeout=240)
    assert "a backward ran before there was an XLA device" in message


def test_what_that_sentence_tells_to_do_helps(worlds: Any) -> None:
    fresh = {**HASTY, "PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "2"}  # ranks of its own, where none has run
    (message,) = worlds(1, fresh).run(backward_and_start, True, timeout=240)
    assert message == "started"
