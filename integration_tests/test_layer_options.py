"""What engines share in options does under each of them what it says, and changes nothing else."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from shard_core import InvalidOption, MissingCapability, get_strategy

WIDTH, LAYERS, ROWS, STEPS = 8, 3, 5, 3
CLIP = 0.05
PRODUCT = torch.ops.aten.addmm.default
#: Strategies that take all of them, and on how many ranks they are looked at.
ALL = {"single": 1, "ddp": 2, "fsdp": 2, "fsdp_cpu_offload": 2, "hsdp": 2}
#: Those that compute layers again, and what they are given for it; at stage 3 every parameter is gathered again, too.
RECOMPUTE: dict[str, dict[str, Any]] = {
    **{name: {} for name in ALL},
    "tp": {"plan": {"layers.*.up": "colwise", "layers.*.down": "rowwise"}},
    "deepspeed_stage_1": {},
    "deepspeed_stage_2": {},
    "deepspeed_stage_3": {"param_persistence_threshold": 0},
}


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(x)))) * scale


class Stack(nn.Module):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x.square().mean()


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, Layer)


def keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del context, args, kwargs
    return CheckpointPolicy.MUST_SAVE if operation is PRODUCT else CheckpointPolicy.PREFER_RECOMPUTE


def keep_products_and_dice(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    """Keep what cannot be kept, too: a mask that is written in place, by a generator that would not move on."""
    del context, args, kwargs
    return operation is PRODUCT or torch.Tag.nondeterministic_seeded in operation.tags


class Graphs:
    """A backend of torch.compile that runs what it is given and counts it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        del inputs
        self.count += 1
        return graph.forward


class Operations(TorchDispatchMode):
    """Counts what is computed, and shapes of what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()
        self.copied: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        if func is torch.ops.aten.copy_.default:
            self.copied[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_bytes(kept: list[int]) -> Iterator[None]:
    """Add up what autograd keeps of activations for backward, as it sees it itself."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[:1] == (ROWS,):
            kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def saved_by(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that backward will be given."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        for name in dir(node):
            saved = getattr(node, name) if name.startswith("_saved_") else None
            if isinstance(saved, torch.Tensor):
                yield saved


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def train(name: str, given: dict[str, Any], optimizer_type: str = "SGD", dropout: float = 0.3) -> dict[str, Any]:
    """Train some steps and return what came of it, and what happened in the last of them."""
    torch.compiler.reset()
    graphs = Graphs()
    options = {**RECOMPUTE[name], **given}
    if given.get("compile"):
        options["compile"] = {"backend": graphs, "fullgraph": True}
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        strategy.seed_everything(5)
        with strategy.module_init_context():
            model = Stack(dropout)
        optimizer = make_optimizer(optimizer_type, model)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        outputs: list[torch.Tensor] = []
        layers = list(strategy.unwrap(model).layers)
        watched = [] if given.get("compile") else layers
        hooks = [layer.register_forward_hook(lambda *given: outputs.append(given[2])) for layer in watched]
        data_rank = strategy.distributed_sampler_kwargs["rank"]
        losses, norms, kept, first = [], [], [], 0
        for step in range(STEPS):
            forward, backward = Operations(), Operations()
            kept.clear()
            outputs.clear()
            # What is compiled is compiled again for whoever looks on.
            counts, watches = (each and not given.get("compile") for each in (step == 0, step == STEPS - 1))
            with counted_bytes(kept) if counts else nullcontext(), forward if watches else nullcontext():
                # Like the inputs of later layers it needs a gradient: a graph is made for either.
                loss = model(batch(data_rank, step).requires_grad_())
            if watches and not given.get("activation_checkpointing"):
                pointers = {saved.data_ptr() for saved in saved_by(loss)}
                originals = sum(each.data_ptr() in pointers for each in outputs)
            else:
                originals = None
            first = sum(kept) if counts else first
            with backward if watches else nullcontext():
                strategy.backward(loss, model)
            norms.append(float(strategy.clip_gradients_norm(model, optimizer, CLIP)))
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(loss.item())
        for hook in hooks:
            hook.remove()
        return {
            "result": (losses, norms, {key: each.clone() for key, each in strategy.full_parameters(model)}),
            "calls": [layer.calls for layer in layers],
            "kept": first,
            "originals": originals,
            "again": backward.calls[PRODUCT],
            "copied": forward.copied,
            "graphs": graphs.count,
        }


def make_optimizer(optimizer_type: str, model: nn.Module) -> torch.optim.Optimizer:
    if optimizer_type == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def plain(optimizer_type: str, ranks: int) -> Any:
    """Train in plain PyTorch, on what all ranks see."""
    torch.manual_seed(5)
    model = Stack(0.0)
    optimizer = make_optimizer(optimizer_type, model)
    losses, norms = [], []
    for step in range(STEPS):
        each = [model(batch(rank, step)) for rank in range(ranks)]
        (sum(each) / ranks).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses, norms, dict(model.named_parameters())


CHECKPOINTED: dict[str, Any] = {
    "a class": Layer,
    "classes": [Layer],
    "a function": is_layer,
    "operations": {"layers": Layer, "policy": ["aten.addmm"]},
    "a policy": {"layers": is_layer, "policy": keep_products},
    "a policy of more": {"layers": Layer, "policy": keep_products_and_dice},
}
SELECTIVE = ("operations", "a policy", "a policy of more")


def variants(name: str, run: Callable[..., Any], given: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {label: run(name, options) for label, options in given.items()}


def under(worlds: Any, name: str, ranks: int, given: dict[str, dict[str, Any]], **kwargs: Any) -> list[dict[str, Any]]:
    """Train under each of some options in one world; return what came of them, rank by rank."""
    return worlds(ranks).run(variants, name, functools.partial(train, **kwargs), {"plain": {}, **given}, timeout=240.0)


def assert_same(found: Any, truth: Any) -> None:
    """Compare results bit by bit."""
    assert found[:2] == truth[:2]
    assert found[2].keys() == truth[2].keys(), "nothing is wrapped"
    assert all(torch.equal(found[2][key], value) for key, value in truth[2].items())


@pytest.mark.parametrize("name", RECOMPUTE)
def test_checkpointed_layers_run_again_to_the_bit(worlds: Any, name: str) -> None:
    given = {label: {"activation_checkpointing": layers} for label, layers in CHECKPOINTED.items()}
    for found in under(worlds, name, ALL.get(name, 2), given):
        truth = found.pop("plain")
        assert (truth["calls"], truth["again"]) == ([STEPS] * LAYERS, 0)
        for label, each in found.items():
            assert_same(each["result"], truth["result"])
            assert each["calls"] == [2 * STEPS] * LAYERS, label
            assert each["kept"] <= ROWS * WIDTH * 4 * (LAYERS + 1) < truth["kept"] / 4, "an input per layer"
            # The last product of a layer is not needed again: its result is in nobody's gradient.
            assert (each["again"] == 0) == (label in SELECTIVE), label
            assert label in SELECTIVE or each["again"] >= LAYERS


@pytest.mark.parametrize("name", ALL)
def test_offloaded_activations_are_copies_and_parameters_are_not(worlds: Any, name: str) -> None:
    given = {
        "all": {"activation_offload": True},
        "layers": {"activation_offload": Layer},
        "inputs": {"activation_offload": True, "activation_checkpointing": Layer},
    }
    for found in under(worlds, name, ALL[name], given):
        truth = found.pop("plain")
        assert truth["originals"] == LAYERS, "each output is somebody's input, kept as it is"
        for label, each in found.items():
            assert_same(each["result"], truth["result"])
            copied = each["copied"] - truth["copied"]
            assert copied, label
            assert all(shape[0] == ROWS for shape in copied), f"{label}: activations alone are copied, not {copied}"
        # What the loss keeps is outside of the layers.
        assert [found[label]["originals"] for label in ("all", "layers")] == [0, 1]
        inputs = found["inputs"]["copied"] - truth["copied"]
        assert inputs == {(ROWS, WIDTH): LAYERS + 1}, "an input per layer, and what the loss keeps"
        assert found["inputs"]["calls"] == [2 * STEPS] * LAYERS


@pytest.mark.parametrize("name", ALL)
def test_a_graph_serves_all_blocks_whatever_else_is_asked_of_them(worlds: Any, name: str) -> None:
    given: dict[str, dict[str, Any]] = {
        "alone": {},
        "selective": {"activation_checkpointing": CHECKPOINTED["a policy"], "activation_offload": True},
        "layers": {"activation_checkpointing": Layer, "activation_offload": Layer},
    }
    given = {label: {**options, "compile": True} for label, options in given.items()}
    for found in under(worlds, name, ALL[name], given, dropout=0.0):
        truth = found.pop("plain")
        for label, each in found.items():
            assert_same(each["result"], truth["result"])
            assert each["graphs"] == 1, label
            assert each["calls"] == [0] * LAYERS, "no layer runs outside of its graph"


def exchanged_after_teardown(name: str, given: dict[str, Any]) -> list[list[str]]:
    """Set a module up and tear down; return what of its layers was exchanged before and after that."""
    model = Stack()
    with get_strategy(name, accelerator="cpu", **RECOMPUTE[name], **given) as strategy:
        strategy.setup_module(model)
        during = exchanged(model.layers)
    return [during, exchanged(model.layers)]


def exchanged(layers: nn.ModuleList) -> list[str]:
    names = ("forward", "_compiled_call_impl")
    return [name for name in names for layer in layers if vars(layer).get(name) is not None]


@pytest.mark.parametrize("name", RECOMPUTE)
def test_layers_run_as_before_after_teardown(worlds: Any, name: str) -> None:
    given = {"activation_checkpointing": Layer, **({"compile": {"backend": "eager"}} if name in ALL else {})}
    for during, after in worlds(ALL.get(name, 2)).run(exchanged_after_teardown, name, given):
        assert set(during) == ({"forward", "_compiled_call_impl"} if name in ALL else {"forward"})
        assert after == []


@pytest.mark.parametrize("optimizer_type", ["SGD", "AdamW"])
@pytest.mark.parametrize("name", ALL)
def test_training_is_that_of_plain_pytorch(worlds: Any, name: str, optimizer_type: str) -> None:
    ranks = ALL[name]
    both = {"activation_checkpointing": {"layers": Layer, "policy": ["aten.addmm"]}, "activation_offload": True}
    losses, norms, weights = plain(optimizer_type, ranks)
    found = under(worlds, name, ranks, {"both": both}, optimizer_type=optimizer_type, dropout=0.0)
    for rank, each in enumerate(found):
        own, norm, trained = each["both"]["result"]
        torch.testing.assert_close(own, [loss[rank] for loss in losses])
        torch.testing.assert_close(norm, norms)
        torch.testing.assert_close(trained, {key: value.detach() for key, value in weights.items()})


#: Values of options that engines share and some do not take yet.
LATER: dict[str, Any] = {
    **{"activation_offload": True, "compile": True, "auto_wrap_policy": Layer, "ignored_modules": [Layer]},
    **{"ignored_states": ["bias"], "backward_prefetch": None, "forward_prefetch": True, "param_init_fn": print},
    **{"cpu_offload": True, "mixed_precision": MixedPrecision()},
}


@pytest.mark.parametrize("name", ["tp", "deepspeed"])
@pytest.mark.parametrize("option", LATER)
def test_what_an_engine_does_not_take_yet_gets_a_sentence(name: str, option: str) -> None:
    with pytest.raises((InvalidOption, MissingCapability), match=r"(; |: ).*\.$") as caught:
        get_strategy(name, **{option: LATER[option]})
    asked = "CPU_OFFLOAD" if isinstance(caught.value, MissingCapability) else option
    assert asked in str(caught.value)
    assert "did you mean" not in str(caught.value)
    assert "Its options are" not in str(caught.value)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("option", ["activation_checkpointing", "activation_offload"])
def test_a_function_that_chooses_nothing_is_refused(option: str, name: str) -> None:
    message = rf"{option} is a function that chooses none of the 12 submodules of Stack; .*: Dropout, Layer, Linear\."
    strategy = get_strategy(name, accelerator="cpu", devices=1, **{option: lambda module: False})
    with strategy, pytest.raises(InvalidOption, match=message):
        strategy.setup_module(Stack())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: on a CPU all is in host memory anyway")
def test_copies_of_what_a_device_computes_are_pinned() -> None:
    pinned: list[bool] = []

    class Pinned(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default and args[1].is_cuda and not args[0].is_cuda:
                pinned.append(args[0].is_pinned())
            return func(*args, **(kwargs or {}))

    with get_strategy("single", accelerator="cuda", activation_offload=True) as strategy:
        model = strategy.setup_module(Stack())
        with Pinned():
            loss = model(batch(0, 0).cuda())
        strategy.backward(loss, model)
        assert pinned
        assert all(pinned)
        assert all(parameter.grad is not None and parameter.grad.is_cuda for parameter in model.parameters())
