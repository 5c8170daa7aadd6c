"""What is not to be sharded stays whole and is trained like everything else."""

from typing import Any

import pytest
import torch
from layouts import LAYOUTS
from torch import nn
from torch.distributed.tensor import DTensor

from shard_core import InvalidOption, get_strategy
from shard_core.backend import ignored_parameters
from shard_core.testing import models, oracle, train_under


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).mean()


MIXES = {f"blocks.{n}.1.{kind}" for n in range(2) for kind in ("weight", "bias")}
NORMS = {f"blocks.{n}.0.{kind}" for n in range(2) for kind in ("weight", "bias")}
CHOICES: list[tuple[dict[str, Any], set[str]]] = [
    ({"ignored_modules": [nn.LayerNorm]}, NORMS),
    ({"ignored_modules": ["blocks.*.0"]}, NORMS),
    ({"ignored_modules": [nn.ModuleList]}, NORMS | MIXES),
    ({"ignored_states": ["head.weight", "blocks.*.1.bias"]}, {"head.weight", "blocks.0.1.bias", "blocks.1.1.bias"}),
    ({"ignored_modules": ["head"], "ignored_states": ["blocks.*.1.*"]}, {"head.weight", "head.bias", *MIXES}),
]


def kept_whole(name: str, options: dict[str, Any]) -> tuple[set[str], dict[str, torch.Tensor], bool]:
    """Return which parameters are whole after setup, and their gradients after two micro-batches of this rank's own."""
    with get_strategy(name, unit_bytes=1, **LAYOUTS[name], **options) as strategy:
        strategy.seed_everything(1)
        with strategy.module_init_context():
            model = Model()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        whole = {key for key, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}
        for micro, batch in enumerate(inputs(strategy.global_rank)):
            with strategy.no_backward_sync(model, enabled=micro == 0):
                strategy.backward(model(batch), model)
        gradients = {key: dict(model.named_parameters())[key].grad.clone() for key in whole}
        norm = strategy.clip_gradients_norm(model, optimizer, 1e9)
        return whole, gradients, norm.item()


def inputs(rank: int) -> list[torch.Tensor]:
    return [torch.full((2, 4), float(rank + 2 * micro)) + torch.arange(4.0) for micro in range(2)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("options", "names"), CHOICES)
def test_what_is_ignored_stays_whole_and_has_averaged_gradients(
    worlds: Any, name: str, options: dict[str, Any], names: set[str]
) -> None:
    torch.manual_seed(1)
    plain = Model()
    for rank in range(2):
        for batch in inputs(rank):
            (plain(batch) / 2).backward()
    truth = dict(plain.named_parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    for whole, gradients, found in worlds(2).run(kept_whole, name, options):
        assert whole == names
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, truth[key].grad, rtol=1e-5, atol=1e-6)
        assert found == pytest.approx(norm, rel=1e-5), "what is whole counts once"


def train(options: dict[str, Any]) -> Any:
    return train_under("fsdp", options, "gpt", "adamw", steps=4, accumulate=2)


def test_training_stays_the_same(worlds: Any) -> None:
    truth = oracle.train(
        lambda: models.make("gpt"),
        lambda module: models.make_optimizer("adamw", module),
        models.batches("gpt", 8, 12),
        accumulate=2,
    )
    options = {"ignored_modules": [nn.LayerNorm], "ignored_states": ["head.weight"]}
    oracle.assert_same(worlds(2).run(train, options)[0], truth)


def test_things_themselves_are_found() -> None:
    model = Model()
    whole = {"head.weight", "head.bias", "blocks.0.1.bias"}
    states = [model.blocks[0][1].bias, model.head]
    with get_strategy("fsdp", ignored_states=states, ignored_modules=[model.head]) as strategy:
        model = strategy.setup_module(model)
        assert {name for name, p in model.named_parameters() if not isinstance(p, DTensor)} == whole


@pytest.mark.parametrize("states", [[], ["head.*"]])
def test_what_is_compiled_is_found_by_its_name_and_as_it_is(states: list[str]) -> None:
    model = Model()
    model.head = torch.compile(model.head, backend="aot_eager")
    for asked in ("head", model.head):
        found = ignored_parameters(model, [] if states else [asked], states)
        assert found == set(model.head.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignored_modules": ["haed"]}, "ignored_modules names 'haed', which the model does not have; did you"),
        ({"ignored_modules": [nn.Linear(2, 2)]}, "ignored_modules holds a Linear that is no part of the model"),
        ({"ignored_modules": [nn.Bilinear]}, "ignored_modules names Bilinear, of which the model has none"),
        ({"ignored_states": ["head"]}, "ignored_states names 'head', which the model does not have; did you mean"),
        ({"ignored_states": [nn.Parameter(torch.ones(1))]}, "ignored_states holds a Parameter that is no part"),
        ({"ignored_modules": [""]}, "ignored_modules names '', which the model does not have"),
        ({"ignored_modules": ["*"]}, "ignored_modules and ignored_states leave no parameter to shard; name fewer"),
        ({"ignored_states": [3]}, "ignored_states holds a int that is no part of the model"),
        ({"ignored_states": "head"}, "ignored_states is 'head'; give a list"),
        ({"ignored_modules": nn.Linear}, "ignored_modules is <class 'torch.nn.modules.linear.Linear'>; give a list"),
    ],
)  # fmt: skip
def test_what_is_not_there_gets_a_sentence(options: dict[str, Any], message: str) -> None:
    def set_up() -> None:
        with get_strategy("fsdp", **options) as strategy:
            strategy.setup_module(Model())

    with pytest.raises(InvalidOption, match=message):
        set_up()
