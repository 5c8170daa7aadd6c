"""What a program shows after an operation, and how a rank runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import linecache
import os
import re
import sys
import time
import traceback
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from shard_core.errors import ShardError
from shard_core.selection import get_strategy
from shard_core.testing.programs.model import Interruption
from shard_core.testing.programs.parts.dropout import MASKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shard_core.strategy import Strategy
    from shard_core.testing.programs.program import Segment


_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables by which a launcher tells a process of the others."""
_RELEASED_WITHIN = 5.0
"""Seconds after which something counts as held: graphs let go of tensors, which hold graphs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
    """Why a rank did not come to the end.

    Attributes:
        at: The operation's number; -1 for setup.
        kind: The exception's name.
        text: Its message, or the whole traceback of an exception that is not ours.
        ours: Whether it is one of ours.
        after: What ``state`` shows after it, where it could be asked.
        touched: What this rank has no more as it was after the operation before: ``"gradients"``, ``"generator"``, or
            which parameters are ``"trained"``.
    """

    at: int
    kind: str
    text: str
    ours: bool
    after: dict[str, Any] | None = None
    touched: tuple[str, ...] = ()

    @property
    def alike(self) -> tuple[object, ...]:
        """Return what is the same on all ranks: where and why, but for numbers, and for words that are not ours."""
        return self.at, self.kind, re.sub(r"\d+", "", self.text) if self.ours else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """What one rank showed.

    Attributes:
        data_rank: Its place among the data-parallel ranks, and how many those are.
        begin: After which operation it showed the first; -1 for setup.
        shown: After setup and after each operation, values by name.
        stop: Why it ended early.
        kept: The types of modules and optimizers that something held after the end, when every strategy was torn down.
        altered: After which operation something was no longer what the strategy had returned before, and its name.
    """

    data_rank: tuple[int, int]
    begin: int = -1
    shown: list[dict[str, Any]]
    stop: Stop | None
    kept: tuple[str, ...] = ()
    altered: tuple[int, str] | None = None


def state(
    strategy: Strategy, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Return the weights, optimizer states and learning rates; every rank calls this.

    Args:
        strategy: What set them up.
        modules: What setup returned.
        optimizers: What setup returned.

    Returns:
        On rank 0 ``weights.0.NAME``, ``state.0.NAME.SLOT``, ``rates.0`` and, under a gradient scaler, its ``factor``;
        on other ranks the last two alone.
    """
    shown: dict[str, Any] = {}
    for number, module in enumerate(modules):
        whole = strategy.module_state_dict(module)
        shown |= {f"weights.{number}.{name}": tensor for name, tensor in whole.items()}
    for number, optimizer in enumerate(optimizers):
        slots = strategy.optimizer_state_dict(optimizer).get("state", {})
        for name, values in slots.items():
            tensors = {slot: torch.as_tensor(value) for slot, value in values.items() if value is not None}
            shown |= {f"state.{number}.{name}.{slot}": tensor for slot, tensor in tensors.items()}
        shown[f"rates.{number}"] = [float(group["lr"]) for group in optimizer.param_groups]
    if strategy.precision.scaler is not None:
        shown["factor"] = strategy.precision.scaler.state_dict()["factor"]  # the next backward's
    return shown


def print_shown(number: int, **values: Any) -> None:
    """Print what a script shows, where a person runs it: rank 0 after each operation.

    Args:
        number: The operation's; -1 for setup.
        values: By name.
    """
    if os.environ.get("RANK", "0") == "0":
        print(number, *(f"{name}={_flat(value)}" for name, value in _copied(values).items()))


def interrupted(called: Callable[[], object], output: torch.Tensor) -> None:
    """Call a backward that an exception ends where it comes to a tensor, and go on.

    Args:
        called: What all ranks call, unless nothing computes gradients of the tensor.
        output: The tensor.
    """

    def interrupt(gradient: torch.Tensor) -> None:
        raise Interruption(f"at a gradient of shape {tuple(gradient.shape)}")

    if output.requires_grad:
        output.register_hook(interrupt)
        with contextlib.suppress(Interruption):
            called()


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Expect that a model ends its forward by an exception, and go on.

    Raises:
        AssertionError: If it does not, or leaves autocast on; of a ``KeyboardInterrupt`` torch tells nobody.
    """
    try:
        yield
    except KeyboardInterrupt:
        return
    except Interruption:
        assert not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))), "a failed forward has left autocast on"
        return
    raise AssertionError("the forward has not failed")


def fails(called: Callable[[], object]) -> bool:
    """Call what is to be refused.

    Args:
        called: What all ranks call.

    Returns:
        Whether it was, by one of our errors or by what a user's object raises; after any other a program ends.
    """
    try:
        called()
    except (ShardError, Interruption):
        return True
    return False


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Expect that what stands inside is refused, and go on.

    Raises:
        AssertionError: If it is not.
    """
    try:
        yield
    except ShardError:
        return
    raise AssertionError("what was refused before is not refused now")


def unlaunched() -> None:
    """Forget what a launcher has told this process, as if it was started without one."""
    for name in _LAUNCHED:
        os.environ.pop(name, None)


def run(text: str, folder: str, segment: Segment) -> Trace:
    """Run a segment of a program's script on this rank.

    Args:
        text: What ``script_of`` wrote.
        folder: Where checkpoints go; every rank sees it.
        segment: Which, and from which operation on.
    """
    rank = _Rank(segment.begin)
    namespace: dict[str, Any] = {"__name__": "random_program"}
    name = "<random program>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), namespace)
    namespace |= {"get_strategy": rank.get_strategy, "state": rank.state}
    stop = None
    launched = {name: os.environ[name] for name in _LAUNCHED if name in os.environ}
    try:
        namespace[segment.entry](rank.show, folder)
    except Exception as error:  # noqa: BLE001 - whatever a strategy lets through is a finding
        stop = rank.stop(error)
    finally:
        rank.teardown()
        unlaunched()
        os.environ.update(launched)
        if "torch._dynamo" in sys.modules:  # importing it takes seconds
            torch.compiler.reset()  # or its caches would grow from program to program
    # After a refusal the graph of what was refused may live on: known of DeepSpeed's stage 3.
    kept = rank.kept() if stop is None and "with refused():" not in text else ()
    return Trace(
        data_rank=rank.data_rank, begin=segment.begin, shown=rank.shown, stop=stop, kept=kept, altered=rank.altered
    )


class _Rank:
    """Records what a script shows and what it may leave behind."""

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self.shown: list[dict[str, Any]] = []
        self.data_rank = (0, 1)
        self._strategies: list[Strategy] = []
        self._asked: tuple[Any, ...] | None = None
        self._parameters: list[torch.nn.Parameter] = []
        self._gives_parts = False
        self._built: set[weakref.ref[Any]] = set()
        self._before: dict[str, Any] = {}
        self._returned: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.altered: tuple[int, str] | None = None

    def get_strategy(self, name: str, **options: Any) -> Strategy:
        strategy = get_strategy(name, **options)
        self._strategies.append(strategy)
        lists = (each for each in options.values() if isinstance(each, list))
        self._gives_parts |= any(isinstance(each, torch.nn.Module) for each in itertools.chain.from_iterable(lists))
        return strategy

    def state(self, *asked: Any) -> dict[str, Any]:
        strategy, modules, optimizers = asked
        if self._asked is None or any(one is not other for one, other in zip(modules, self._asked[1], strict=True)):
            # Once: asked for its parameters a module may end what was interrupted, and have all gathered anew.
            self._parameters = [parameter for module in modules for parameter in module.parameters()]
        self._asked = asked
        data = strategy.distributed_sampler_kwargs
        self.data_rank = (data["rank"], data["num_replicas"])
        freed = [each for each in modules if _may_be_freed(each)]
        self._built.update(map(weakref.ref, (*freed, *map(strategy.unwrap, freed), *(optimizers if freed else ()))))
        return state(*asked)

    def show(self, number: int, **values: Any) -> None:
        assert number == self._begin + len(self.shown)
        own = {"generator": torch.get_rng_state(), "masks": dict(enumerate(MASKS.take()))}
        copies = {name: _copied(value) for name, value in values.items()}
        self.shown.append(copies | own)
        if self.altered is None:
            self.altered = next(((number, name) for name, pair in self._returned.items() if not _is_same(*pair)), None)
        self._returned |= _unchanging(values, copies)
        self._before = self._own()

    def stop(self, error: Exception) -> Stop:
        ours = isinstance(error, ShardError)
        text = str(error) if ours else "".join(traceback.format_exception(error))
        at = self._begin + len(self.shown)
        after = None
        touched: tuple[str, ...] = ()
        if ours and self.shown and self._asked is not None and self._strategies[-1] is self._asked[0]:
            own = self._own()
            touched = tuple(name for name, value in own.items() if not _is_same(value, self._before[name]))
            with contextlib.suppress(ShardError):  # what is refused may be what was done before
                after = state(*self._asked)
        return Stop(at=at, kind=type(error).__name__, text=text, ours=ours, after=after, touched=touched)

    def _own(self) -> dict[str, Any]:
        """Return what an operation that is refused leaves alone, beside what ``state`` shows, as this rank has it."""
        *_, optimizers = self._asked or ((),)
        stepped = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
        on_cpu = all(each.device.type == "cpu" for each in stepped)  # looking at others has them compute
        return {
            "trained": [parameter.requires_grad for parameter in self._parameters],
            "gradients": [_local(each.grad) for each in stepped] if on_cpu else [],
            "generator": torch.get_rng_state(),
        }

    def teardown(self) -> None:
        for strategy in self._strategies:
            strategy.teardown()

    def kept(self) -> tuple[str, ...]:
        """Return the types of what is still held, though the script has ended and let go of all but its strategies."""
        self._asked = None
        if self._gives_parts:  # which are a strategy's to hold as long as its user holds it
            self._strategies.clear()
        self._parameters.clear()
        self._returned.clear()
        end = time.monotonic() + _RELEASED_WITHIN
        while any(each() is not None for each in self._built) and time.monotonic() < end:
            gc.collect()
        left = [each() for each in self._built]
        return tuple(sorted({type(each).__name__ for each in left if each is not None}))


def _may_be_freed(module: torch.nn.Module) -> bool:
    """Return whether torch and torch_xla free a module.

    A layer with parametrizations is held by its class, and ``fully_shard`` holds that class. Modules on XLA devices are
    held by torch_xla's hooks of a forward that no backward has followed.
    """
    on_cpu = all(each.device.type == "cpu" for each in module.parameters())
    return on_cpu and not any(map(is_parametrized, module.modules()))


def _local(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Copy what this rank has of a gradient."""
    if gradient is None:
        return None
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return own.detach().to_dense().clone()


def _unchanging(values: dict[str, Any], copies: dict[str, Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return by name the tensors among values, each with its copy, but for those that lead to a graph."""
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            inside = _unchanging(value, copies[name])
            found |= {f"{name}.{key}": pair for key, pair in inside.items()}
        elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.requires_grad:
            found[name] = value, copies[name]
    return found


def _is_same(one: Any, other: Any) -> bool:
    """Check that two values are the same, with what is no number for itself."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def _flat(value: Any) -> Any:
    """Return what is short to print: numbers without their tensor's shape."""
    if isinstance(value, torch.Tensor):
        return value.flatten().tolist()
    return {name: _flat(each) for name, each in value.items()} if isinstance(value, dict) else value


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to_dense().cpu().clone()
    return {name: _copied(each) for name, each in value.items()} if isinstance(value, dict) else value
