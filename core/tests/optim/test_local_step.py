"""Optimizers step the plain tensors behind DTensors, and nothing outside the step shows it."""

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shard_core.optim.local_step import local_step
from shard_core.testing import oracle

SHAPES = {"matrix": (5, 16), "vector": (7,), "one row": (1, 9), "unused": (4,)}
KINDS: list[tuple[str, dict[str, Any], str]] = [
    ("AdamW", {}, "_fused_adamw_"),
    ("AdamW", {"fused": False}, "addcdiv_"),
    ("AdamW", {"foreach": True}, "_foreach_addcdiv_"),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}, "_fused_adam_"),
    ("SGD", {"momentum": 0.9, "nesterov": True}, "_fused_sgd_"),
    ("Adagrad", {}, "_fused_adagrad_"),
    ("RMSprop", {"centered": True}, "_foreach_addcdiv_"),
    ("NAdam", {"foreach": False}, "addcdiv_"),
]


class Operations(TorchDispatchMode):
    """Notes what is computed, and that it is not on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # New state is laid out like its parameter, once.
        assert name == "empty_like" or not any(issubclass(each, DTensor) for each in types)
        self.names.add(name)
        return func(*args, **(kwargs or {}))


def parameters(sharded: bool, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """The same parameters, whole or sharded; gradients are filled in by ``fill``."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES.values()]
    if not sharded:
        return [nn.Parameter(value) for value in values]
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return [nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values]


def fill(made: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in made[:-1]:
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = (
            distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            if isinstance(parameter, DTensor)
            else gradient
        )


def train(name: str, options: dict[str, Any], sharded: bool, operations: Operations | None = None) -> Any:
    made = parameters(sharded)
    optimizer = getattr(optim, name)(made, lr=0.1, **options)
    groups, lists = list(optimizer.param_groups), [group["params"] for group in optimizer.param_groups]
    settings = {key: value for key, value in groups[0].items() if key != "params"}
    for step in range(3):
        fill(made, step)
        if operations is None:
            optimizer.step()
        else:
            with local_step(optimizer), operations:
                optimizer.step()
        assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
        assert groups[0]["params"] is lists[0]
        assert all(a is b for a, b in zip(lists[0], made, strict=True))
        assert {key: value for key, value in groups[0].items() if key != "params"} == settings
    assert (made[-1] in optimizer.state) == (name == "Adagrad")
    return made, optimizer.state


def gathered(name: str, options: dict[str, Any]) -> Any:
    operations = Operations()
    made, state = train(name, options, sharded=True, operations=operations)
    values: dict[str, torch.Tensor] = {}
    for key, parameter in zip(SHAPES, made, strict=True):
        values[key] = parameter.full_tensor()
        for slot, value in state.get(parameter, {}).items():
            if slot != "step" and value.dim():
                assert (value.placements, value.shape) == (parameter.placements, parameter.shape)
                assert value.to_local().shape == parameter.to_local().shape
            values[f"{key}.{slot}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return values, operations.names


@pytest.mark.parametrize(("name", "options", "kernel"), KINDS)
def test_shards_are_stepped_as_the_whole_is(worlds: Any, name: str, options: dict[str, Any], kernel: str) -> None:
    made, state = train(name, options, sharded=False)
    truth = {key: parameter.detach() for key, parameter in zip(SHAPES, made, strict=True)}
    truth |= {f"{key}.{s}": v for key, p in zip(SHAPES, made, strict=True) for s, v in state.get(p, {}).items()}
    for values, operations in worlds(2).run(gathered, name, options):
        assert set(values) == set(truth)
        oracle.assert_same_weights(values, truth, 1e-6, elementwise=True)
        assert kernel in operations


def seen_by_hooks() -> Any:
    made = parameters(sharded=True)
    optimizer = optim.AdamW(made)
    seen: list[Any] = []

    def look(stepped: optim.Optimizer, *_: Any) -> None:
        group = stepped.param_groups[0]
        seen.append((group["fused"], all(isinstance(p, DTensor) for p in (*group["params"], *stepped.state))))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    fill(made, 0)
    with local_step(optimizer):
        optimizer.step()
    return seen


def test_hooks_on_the_step_see_what_is_the_users(worlds: Any) -> None:
    assert worlds(2).run(seen_by_hooks) == [[(None, True), (None, True)]] * 2


def failing_step() -> Any:
    made = parameters(sharded=True)
    optimizer = optim.AdamW(made)
    fill(made, 0)
    with local_step(optimizer):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError), local_step(optimizer):
        optimizer.step()
    return all(isinstance(p, DTensor) for p in (*optimizer.param_groups[0]["params"], *optimizer.state))


def test_a_step_that_fails_leaves_the_optimizer_as_it_was(worlds: Any) -> None:
    assert worlds(2).run(failing_step) == [True, True]


class Noting(optim.SGD):
    """Knows parameters by more than their elements."""

    def step(self, closure: Any = None) -> Any:
        self.noted = [type(parameter).__name__ for parameter in self.param_groups[0]["params"]]
        return super().step(closure)


def in_few_bits() -> Any:
    made = parameters(sharded=True, dtype=torch.bfloat16)
    optimizer = optim.AdamW(made, lr=0.1)
    operations = Operations()
    for step in range(3):
        fill(made, step)
        with local_step(optimizer), operations:
            optimizer.step()
    return [parameter.full_tensor() for parameter in made], operations.names


def test_in_few_bits_it_rounds_as_torchs_loop_does(worlds: Any) -> None:
    made = parameters(sharded=False, dtype=torch.bfloat16)
    optimizer = optim.AdamW(made, lr=0.1)
    for step in range(3):
        fill(made, step)
        optimizer.step()
    for values, operations in worlds(2).run(in_few_bits):
        assert all(map(torch.equal, values, made))
        assert "_fused_adamw_" not in operations


def own_step() -> Any:
    made = parameters(sharded=True)
    optimizer = Noting(made, lr=0.1)
    fill(made, 0)
    with local_step(optimizer):
        optimizer.step()
    return set(optimizer.noted)


def test_a_step_of_the_users_own_gets_dtensors(worlds: Any) -> None:
    assert worlds(2).run(own_step) == [{"DTensor"}] * 2


def mixed_groups() -> Any:
    made = parameters(sharded=True)
    optimizer = optim.AdamW(made[:1])
    fill(made, 0)
    with local_step(optimizer):
        optimizer.step()
    optimizer.add_param_group({"params": made[1:], "foreach": True})
    operations = Operations()
    with local_step(optimizer), operations:
        optimizer.step()
    return {"_fused_adamw_", "_foreach_addcdiv_"} & operations.names


def test_one_group_that_chooses_chooses_for_all(worlds: Any) -> None:
    assert worlds(2).run(mixed_groups) == [{"_foreach_addcdiv_"}] * 2


def late() -> Any:
    """Step with a parameter that meets its first gradient after the others."""
    results = []
    for sharded in (True, False):
        made = parameters(sharded)
        optimizer = optim.SGD(made, lr=0.1, momentum=0.9)
        for step in range(3):
            fill(made, step)
            if step == 0:
                made[0].grad = None
            with local_step(optimizer):
                optimizer.step()
        results.append([each.full_tensor() if isinstance(each, DTensor) else each for each in made])
    return results


def test_a_gradient_that_comes_late_is_stepped_as_torch_does(worlds: Any) -> None:
    for shards, whole in worlds(2).run(late):
        for mine, theirs in zip(shards, whole, strict=True):
            torch.testing.assert_close(mine, theirs)


def with_a_closure(sharded: bool) -> list[torch.Tensor]:
    made = parameters(sharded)
    seen = []
    optimizer = optim.AdamW(made, lr=0.1)

    def closure() -> None:
        seen.append(all(optimizer.param_groups[0]["params"][i] is each for i, each in enumerate(made)))
        fill(made, len(seen))

    for _ in range(2):
        if sharded:
            with local_step(optimizer) as outside:
                optimizer.step(outside(closure))
        else:
            optimizer.step(closure)
    assert seen == [True, True]
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach() for each in made]


def test_a_closure_finds_the_optimizer_as_it_is_outside(worlds: Any) -> None:
    plain = with_a_closure(sharded=False)
    for stepped in worlds(2).run(with_a_closure, True):
        for mine, truth in zip(stepped, plain, strict=True):
            torch.testing.assert_close(mine.detach(), truth)
