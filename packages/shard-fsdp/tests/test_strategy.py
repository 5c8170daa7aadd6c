"""Units, ties, accumulation and evaluation under fully sharded training."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from wire import Wire

from shard_core import InvalidOption, SetupError, get_strategy
from shard_core.testing import models, oracle, train_under


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit_bytes": 0}, "unit_bytes is 0; give a whole number of bytes from 1 up"),
        ({"unit_bytes": True}, "unit_bytes is True"),
        ({"unit_bytes": "64MB"}, "unit_bytes is '64MB'"),
        ({"reshard_after_forward": "no"}, "reshard_after_forward is 'no'; give True, False or None"),
        ({"reshard_after_forward": 1}, "reshard_after_forward is 1; give True, False or None"),
        (
            {"unit_bytes": 1, "auto_wrap_policy": nn.Linear},
            "unit_bytes is 1, but auto_wrap_policy says which submodules are units; leave one of them out",
        ),
        ({"unit_byte": 1}, "has no option 'unit_byte'; did you mean 'unit_bytes'"),
    ],
)
def test_wrong_options_get_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        get_strategy("fsdp", **options)


def train(options: dict[str, Any], settings: dict[str, Any]) -> Any:
    return train_under("fsdp", options, "gpt", "adamw", steps=6, **settings)


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("unit_bytes", [1, 40_000, 2**30])
def test_units_change_nothing_in_the_result(worlds: Any, unit_bytes: int, reshard: bool | None) -> None:
    truth = oracle.train(
        lambda: models.make("gpt"),
        lambda module: models.make_optimizer("adamw", module),
        models.batches("gpt", 12, 12),
        accumulate=2,
    )
    options = {"unit_bytes": unit_bytes, "reshard_after_forward": reshard}
    oracle.assert_same(worlds(2).run(train, options, {"accumulate": 2})[0], truth)


def shards_and_log() -> Any:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shard_core.fully_shard.units")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with get_strategy("fsdp", unit_bytes=800) as strategy:
        model = nn.Sequential(*[nn.Linear(10, 10) for _ in range(4)])
        model = strategy.setup_module(model)
        local = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
        logger.removeHandler(handler)
        return local, lines


def test_it_says_what_it_wrapped(worlds: Any) -> None:
    results = worlds(2).run(shards_and_log)
    assert sum(local for local, _ in results) == 4 * 110
    assert results[0][1] == [
        "unit 0, 1: 0.0 MiB",
        "unit 2, 3: 0.0 MiB",
        "root unit: 0.0 of 0.0 MiB, over 2 ranks",
    ]


def tied() -> Any:
    with get_strategy("fsdp", unit_bytes=1) as strategy:
        with strategy.module_init_context():
            model = models.make("gpt")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        ((inputs, targets),) = models.batches("gpt", 1, 4)
        strategy.backward(model(inputs, targets), model)
        strategy.optimizer_step(optimizer)
        return model.head.weight is model.embedding.weight, set(strategy.module_state_dict(model))


def test_tied_weights_stay_one_parameter(worlds: Any) -> None:
    for same, names in worlds(2).run(tied):
        assert same
        assert not names or {"head.weight", "embedding.weight"} <= names


def traffic(defer: bool) -> int:
    """Count the reductions of four micro-batches."""
    with get_strategy("fsdp") as strategy:
        model = models.make("plain")
        model, _ = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        batch = models.batches("plain", 1, 4)[0]
        strategy.backward(model(*batch), model)
        with Wire() as wire:
            for micro in range(4):
                with strategy.no_backward_sync(model, enabled=defer and micro < 3):
                    strategy.backward(model(*batch), model)
        return len(wire.scatters)


def test_deferring_saves_all_but_the_last_reduction(worlds: Any) -> None:
    assert worlds(2).run(traffic, False) == [4, 4]
    assert worlds(2).run(traffic, True) == [1, 1]


def evaluate_then_look() -> Any:
    with get_strategy("fsdp", reshard_after_forward=False) as strategy:
        model = models.make("plain")
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        batch = models.batches("plain", 1, 4)[0]
        before = strategy.module_state_dict(model)
        with torch.no_grad():
            model(*batch)
        assert {name: t.shape for name, t in strategy.module_state_dict(model).items()} == {
            name: t.shape for name, t in before.items()
        }
        strategy.backward(model(*batch), model)
        assert strategy.optimizer_step(optimizer)
        return dict(strategy.full_parameters(model))


def test_evaluation_in_between_leaves_the_shards_alone(worlds: Any) -> None:
    ranks = worlds(2).run(evaluate_then_look)
    for name, tensor in ranks[0].items():
        assert torch.equal(tensor, ranks[1][name])


def scalar_gradients(defer: bool) -> float:
    with get_strategy("fsdp") as strategy:
        strategy.seed_everything(0)
        model = models.make("scalar")
        model, _ = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        for number, batch in enumerate(models.batches("scalar", 2, 4)):
            with strategy.no_backward_sync(model, enabled=defer and number == 0):
                share = models.share(batch, strategy.global_rank, strategy.world_size)
                strategy.backward(model(*share), model)
        assert not isinstance(model.temperature, DTensor)
        return model.temperature.grad.item()


@pytest.mark.parametrize("defer", [True, False])
def test_parameters_without_a_dimension_are_averaged(worlds: Any, defer: bool) -> None:
    torch.manual_seed(0)
    model = models.make("scalar")
    for batch in models.batches("scalar", 2, 4):
        model(*batch).backward()
    truth = pytest.approx(model.temperature.grad.item(), rel=1e-6)
    assert worlds(2).run(scalar_gradients, defer) == [truth, truth]


def optimizer_after(early: bool) -> list[float]:
    with get_strategy("fsdp") as strategy:
        with strategy.module_init_context():
            model = models.make("uneven")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if early else None
        model = strategy.setup_module(model)
        optimizer = strategy.setup_optimizer(optimizer or torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for batch in models.batches("uneven", 3, 12):
            loss = model(*models.share(batch, strategy.global_rank, strategy.world_size))
            strategy.backward(loss, model)
            assert strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(strategy.all_reduce(loss).item())
        return losses


@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_may_be_made_before_or_after_sharding(worlds: Any, size: int) -> None:
    before, after = (worlds(size).run(optimizer_after, early)[0] for early in (True, False))
    assert before == after
    assert before[2] < before[0]


def set_up_hooked() -> str:
    with get_strategy("fsdp") as strategy:
        module = models.make("plain")
        module.second.weight.register_post_accumulate_grad_hook(lambda _: None)
        with pytest.raises(SetupError) as error:
            strategy.setup_module(module)
        return str(error.value)


def test_hooks_that_sharding_would_lose_are_refused(worlds: Any) -> None:
    for message in worlds(2).run(set_up_hooked):
        assert message.startswith("parameter 'second.weight' has a hook on its gradient that nothing would call")


class Hollow(nn.Module):
    """Has parameters without elements, as layers of size zero do, and sums them into its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.make("plain")
        self.empty = nn.Parameter(torch.empty(0))
        self.flat = nn.Parameter(torch.zeros(0, 3))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs, targets) + self.empty.sum() + self.flat.sum()


def empty_gradients(path: Path, recorded: bool) -> list[tuple[int, ...]]:
    with get_strategy("fsdp") as strategy:
        with strategy.module_init_context() if recorded else contextlib.nullcontext():
            model = Hollow()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.AdamW(model.parameters())])
        for batch in models.batches("plain", 2, 12):
            strategy.backward(model(*models.share_of(strategy, batch)), model)
            shapes = [tuple(each.grad.shape) for each in (model.empty, model.flat)]
            assert strategy.clip_gradients_norm(model, optimizer, 1.0) > 0
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        strategy.save_checkpoint(path, {"model": model, "optimizer": optimizer})
        strategy.load_checkpoint(path, {"model": model, "optimizer": optimizer})
        return shapes


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_parameters_without_elements_stay_whole(worlds: Any, size: int, recorded: bool, tmp_path: Path) -> None:
    assert worlds(size).run(empty_gradients, tmp_path / "c", recorded) == [[(0,), (0, 3)]] * size


def load_by_hand(values: dict[str, torch.Tensor], options: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    with get_strategy("fsdp", **options) as strategy:
        model = strategy.setup_module(models.make("gpt"))
        (batch,) = models.batches("gpt", 1, 2)
        model(*batch)  # leaves the root's parameters whole
        strategy.unwrap(model).load_state_dict(values)
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**values, "head.weight": torch.ones(2, 2)})
        return model(*batch).item(), {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


@pytest.mark.parametrize("options", [{}, {"unit_bytes": 1}, {"cpu_offload": True}], ids=["root", "units", "offloaded"])
def test_whole_tensors_are_loaded_by_hand(worlds: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    plain = models.make("gpt")
    expected = plain(*models.batches("gpt", 1, 2)[0]).item()
    for loss, weights in worlds(2).run(load_by_hand, plain.state_dict(), options):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert all(torch.equal(weights[name], tensor) for name, tensor in plain.named_parameters())
