"""What was built on the meta device gets values from the user's function, all of it and once, or is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import InvalidOption, SetupError, get_strategy


class Net(nn.Module):
    """Tied weights, a buffer that no checkpoint holds, a 0-d parameter."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 9)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.gain.fill_(0.5)
            self.table.copy_(torch.arange(6.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.head(self.norm(self.embedding(tokens) + self.table)) * self.gain).mean()


def usual(module: nn.Module) -> None:
    """Initialize as people write it for FSDP1, the accelerator included."""
    module.to_empty(device=torch.device("cuda"), recurse=False)
    module.reset_parameters()  # type: ignore[operator]


def only_empty(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)


def forgets_the_buffer(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter) if parameter.dim() else nn.init.ones_(parameter)


def does_nothing(module: nn.Module) -> None:
    del module


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def plain() -> dict[str, torch.Tensor]:
    """Initialize in the order in which setup asks for it."""
    torch.manual_seed(7)
    model = on_meta()
    model.to_empty(device="cpu")
    model.reset_parameters()
    model.embedding.reset_parameters()
    model.norm.reset_parameters()
    weight = model.embedding.weight.detach().clone()
    model.head.reset_parameters()
    with torch.no_grad():
        model.head.weight.copy_(weight)
    return {**dict(model.named_parameters()), "table": model.table}


def initialised(options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], bool, bool]:
    with get_strategy("fsdp", param_init_fn=usual, **options) as strategy:
        strategy.seed_everything(7)
        model = on_meta()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        values = {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}
        tied = model.head.weight is model.embedding.weight
        before = values["gain"].item()
        strategy.backward(model(torch.arange(4)), model)
        strategy.optimizer_step(optimizer)
        moved = dict(strategy.full_parameters(model))["gain"].item() != before
        return {**values, "table": model.table.clone()}, tied, moved


@pytest.mark.parametrize("options", [{}, {"ignored_modules": ["embedding"]}])
def test_the_users_function_gives_the_values(worlds: Any, options: dict[str, Any]) -> None:
    truth = plain()
    for values, tied, moved in worlds(2).run(initialised, options):
        assert tied
        assert moved, "an optimizer made over meta parameters steps the real ones"
        assert values.keys() == truth.keys()
        for name, tensor in truth.items():
            assert torch.equal(values[name], tensor), name


def refused(function: Any) -> str:
    with get_strategy("fsdp", param_init_fn=function) as strategy, pytest.raises(SetupError) as error:
        strategy.setup_module(on_meta())
    return str(error.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (None, "'gain' is on the meta device, so nothing says what it holds; build inside module_init_context()"),
        (only_empty, "param_init_fn leaves 'gain' without values; let it initialise every parameter and buffer"),
        (forgets_the_buffer, "param_init_fn leaves 'table' without values"),
        (does_nothing, "param_init_fn leaves 'gain' on the meta device"),
    ],
)
def test_nothing_is_left_to_chance(worlds: Any, function: Any, message: str) -> None:
    assert all(message in answer for answer in worlds(2).run(refused, function))


def loaded_on_rank_zero() -> str:
    with get_strategy("fsdp", param_init_fn=only_empty) as strategy, pytest.raises(SetupError) as error:
        strategy.setup_module(Net() if strategy.is_global_zero else on_meta())
    return str(error.value)


def test_ranks_that_have_built_differently_get_an_error(worlds: Any) -> None:
    message = "'embedding.weight' is on the meta device on rank 0 or on rank 1, and not on the other"
    assert all(message in answer for answer in worlds(2).run(loaded_on_rank_zero))


def test_what_was_recorded_needs_no_function(worlds: Any) -> None:
    assert worlds(2).run(recorded) == [[], []]


def recorded() -> list[str]:
    asked: list[str] = []
    with get_strategy("fsdp", param_init_fn=lambda module: asked.append(str(module))) as strategy:
        with strategy.module_init_context():
            model = Net()
        strategy.setup_module(model)
    return asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"param_init_fn": "normal_"}, "param_init_fn is 'normal_'; give a function of a module"),
        ({"sync_module_states": False}, "sync_module_states is False; a model of different values"),
    ],
)
def test_wrong_options_get_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        get_strategy("fsdp", **options)
