"""Averages of what each rank steps are plain PyTorch's, cost a shard, and load wherever weights do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shard_core import ExponentialMovingAverage, get_strategy
from shard_core.testing import models, oracle, set_up, step, whole_weights

DECAY = 0.7
STAGES = [
    {"name": "deepspeed", "stage": 0},
    {"name": "deepspeed_stage_1"},
    {"name": "deepspeed_stage_2"},
    {"name": "deepspeed_stage_3", "param_persistence_threshold": 0},
    {"name": "deepspeed_stage_3"},
]


class Mixed(torch.nn.Module):
    """A layer that is tied, one that is frozen, one without dims, and a statistic that forwards change."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 5)
        self.register_buffer("seen", torch.zeros(5))
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
        self.again = torch.nn.Linear(5, 5)
        self.again.weight = self.first.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.lerp_(x.detach().mean(0), 0.1)
        return (self.again(self.frozen(self.first(x - self.seen).relu())) * self.scale).square().mean()


def make(kind: str) -> torch.nn.Module:
    return Mixed() if kind == "mixed" else models.make(kind)


def draw(kind: str) -> list[tuple[torch.Tensor, ...]]:
    if kind != "mixed":
        return list(models.batches(kind, 5, 6))
    generator = torch.Generator().manual_seed(3)
    # Ranks' parts are alike, so that their statistics are those of the whole.
    return [(torch.randn(3, 5, generator=generator).repeat(2, 1),) for _ in range(5)]


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in module.parameters() if each.requires_grad], lr=0.05, momentum=0.9)


def plainly(kind: str) -> list[dict[str, torch.Tensor] | float]:
    """Train in plain PyTorch; give the averages and their loss after three steps, and the weights after five."""
    torch.manual_seed(0)
    model = make(kind)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)  # the first only copies
    optimizer, batches = sgd(model), draw(kind)
    averages: dict[str, torch.Tensor] = {}
    loss = 0.0
    for number, batch in enumerate(batches):
        if number == 3:
            averages = {name: value.clone() for name, value in average.module.named_parameters()}
            average.eval()
            loss = average(*batches[4]).item()
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return [averages, loss, dict(model.named_parameters())]


def trained(options: dict[str, Any], kind: str, path: Path) -> list[Any]:
    with get_strategy(**options) as strategy:
        model, optimizer = set_up(strategy, lambda: make(kind), sgd)
        average = ExponentialMovingAverage(strategy, model, DECAY)
        batches = draw(kind)
        messages = 0
        for batch in batches[:3]:
            step(strategy, model, optimizer, batch)
            with CommDebugMode() as traffic:
                average.update()
            messages += traffic.get_total_counts()
        before = whole_weights(strategy, model)
        parts = [part.detach().clone() for group in optimizer.param_groups for part in group["params"]]
        model.eval()
        with average.applied(), torch.no_grad():
            loss = model(*batches[4]).item()
            within = whole_weights(strategy, model)
        model.train()
        after = whole_weights(strategy, model)
        assert all(torch.equal(after[name], before[name]) for name in before)
        stepped = [part for group in optimizer.param_groups for part in group["params"]]
        assert all(torch.equal(part, copy) for part, copy in zip(stepped, parts, strict=True))
        strategy.save_checkpoint(path, {"model": model, "optimizer": optimizer, "average": average})
        for batch in batches[3:]:
            step(strategy, model, optimizer, batch)
        held = sum(value.numel() for value in average.kept_module.parameters())
        return [messages, held, within, loss, whole_weights(strategy, model)]


@pytest.mark.parametrize("kind", ["gpt", "uneven", "scalar", "mixed"])
@pytest.mark.parametrize("options", STAGES, ids=lambda options: "-".join(map(str, options.values())))
def test_averages_are_those_of_plain_pytorch_and_training_goes_on(
    worlds: Any, tmp_path: Path, options: dict[str, Any], kind: str
) -> None:
    averages, loss, final = plainly(kind)
    names = set(final)
    answers = worlds(2).run(trained, options, kind, tmp_path / "run")
    if options.get("stage") != 0 and kind != "mixed":  # what is frozen is whole on every rank at stages 1 and 2
        assert sum(held for _, held, *_ in answers) == sum(value.numel() for value in averages.values())
    for messages, _, within, its_loss, its_final in answers:
        assert messages == 0
        oracle.assert_same_weights({name: within[name] for name in names}, averages, 2e-6, elementwise=True)
        assert abs(its_loss - loss) < 1e-5
        oracle.assert_same_weights({name: its_final[name] for name in names}, final, 1e-5)


def loaded(options: dict[str, Any], kind: str, path: Path, onward: Path) -> list[Any]:
    """Load averages as averages, save them, and load them once more as weights."""
    with get_strategy(**options) as strategy:
        strategy.seed_everything(1)
        with strategy.module_init_context():
            model = make(kind)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [sgd(model)])
        average = ExponentialMovingAverage(strategy, model, DECAY)
        strategy.load_checkpoint(path, {"model": model, "optimizer": optimizer, "average": average})
        weights = whole_weights(strategy, model)
        with average.applied():
            within = whole_weights(strategy, model)
        strategy.save_checkpoint(onward, {"model": model, "optimizer": optimizer, "average": average})
        strategy.load_checkpoint(onward, {"average": model})
        return [weights, within, whole_weights(strategy, model)]


@pytest.mark.parametrize("kind", [pytest.param("gpt", marks=pytest.mark.long), "mixed"])
def test_averages_move_between_stages_sizes_and_strategies(worlds: Any, tmp_path: Path, kind: str) -> None:
    route: list[tuple[int, dict[str, Any]]] = [
        (2, {"name": "ddp"}),
        (2, STAGES[3]),
        (3, STAGES[1]),
        (1, {"name": "single"}),
        (3, STAGES[4]),
        (2, {"name": "ddp"}),
        (2, STAGES[2]),
        (2, {"name": "fsdp"}),
    ]
    first, *others = enumerate(route)
    *_, expected, _, _ = worlds(2).run(trained, first[1][1], kind, tmp_path / "0")[0]
    for hop, (size, options) in others:
        paths = tmp_path / str(hop - 1), tmp_path / str(hop)
        for weights, within, as_weights in worlds(size).run(loaded, options, kind, *paths):
            assert within.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(within[name], value), (hop, name)
                assert torch.equal(as_weights[name], value), (hop, name)
            assert any(not torch.equal(weights[name], value) for name, value in expected.items())


def in_16_bits(options: dict[str, Any]) -> list[Any]:
    """Average what 16 bits do not hold; give what is stepped with the averages applied, and afterwards."""
    with get_strategy(**options, precision="bf16-true") as strategy, torch.no_grad():
        model, optimizer = set_up(strategy, "plain", "sgd")
        parts = [part for group in optimizer.param_groups for part in group["params"]]
        shown = []

        def fill(value: float) -> None:
            for part in parts:
                part.fill_(value)

        def show() -> None:
            shown.append([value for part in parts for value in part.tolist()])
            shown.append(model(*models.batches("plain", 1, 6)[0]).item())

        fill(1.0)
        average = ExponentialMovingAverage(strategy, model, 0.999)
        fill(2.0)
        average.update()
        fill(1.0009765625)
        with average.applied():
            show()
        show()
        return shown


@pytest.mark.parametrize("options", STAGES[1:], ids=lambda options: "-".join(map(str, options.values())))
def test_small_changes_count_and_nothing_is_rounded_in_16_bits(worlds: Any, options: dict[str, Any]) -> None:
    plain = models.make("plain").bfloat16()
    for parameter in plain.parameters():
        torch.nn.init.ones_(parameter)
    inputs, targets = models.batches("plain", 1, 6)[0]
    expected = plain(inputs.bfloat16(), targets.bfloat16()).item()
    for averages, loss, left, after in worlds(2).run(in_16_bits, options):
        assert averages == pytest.approx([1.001] * len(averages), abs=1e-6)
        assert left == [1.0009765625] * len(left)
        assert loss == after == pytest.approx(expected, rel=0.01)  # computed with 1, as both are in bfloat16
