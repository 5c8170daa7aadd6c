"""Which optimizers work element by element, so that each rank may step its own shards as if they were all."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shard_core.optim.trial import Bounds, NoAnswer, Trial, named, undisturbed

#: Large enough that optimizers which treat small matrices differently see a large one.
_MATRIX = (136, 144)

#: By size, the pieces of a tensor: multiples of 64, so that vectorized kernels leave no rest and give the same bits.
#: The later begin where no block of the 256 of block-wise quantization does, so that blocks are split. The first
#: is small: to an optimizer that keeps statistics of rows each element is a row, and that is found out early.
_PIECES = {136 * 144: [64, 6400, 13120], 1152: [64, 384, 704]}

#: By piece, its neighbours in the same step: the shapes before it, those after it, and the scale of gradients.
_NEIGHBOURS: tuple[tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...], float], ...] = (
    ((), (), 1.0),
    ((), ((90, 100),), 30.0),
    (((40, 7), (9,)), (), 1e-4),
)

#: What gradients are multiplied by, in turn. Small ones first: what is divided by them shows.
_SCALES = (1e-4, 1.0, 1e3, 1e-2)
#: Each of three kinds of gradients at each scale; beyond the tenth, since many do something every so many steps.
_STEPS = 3 * len(_SCALES)

#: What is known to: of torch's own classes it is only to be seen that they run, with these settings and on this device.
#: Their first step makes state, and the second goes on from it. A class that is derived from one may do anything.
KNOWN = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta),
    *(torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop),
    torch.optim.Rprop,
)
_STEPS_OF_KNOWN = 2

#: Names that optimizers and schedulers add to a group and that no constructor takes.
_BOOKKEEPING = ("params", "param_names", "initial_lr")

_IN_PIECES = "it steps a matrix differently from the same numbers in flat pieces"
_WITH_NEIGHBOURS = "it steps a matrix differently from the same numbers in flat pieces beside other tensors"
_STATE = "it keeps state that is not the same, element by element, for a matrix and its flat pieces"
_SHARED = "what it keeps for all parameters of a group depends on which tensors it steps"
_CANNOT_STEP_PIECES = "it cannot step a flat piece of a matrix"

_AS_THEY_ARE: Mapping[str, Any] = types.MappingProxyType({})


def why_not_elementwise(
    optimizer: torch.optim.Optimizer, device: torch.device, settings: Mapping[str, Any] = _AS_THEY_ARE
) -> str | None:
    """Explain why an optimizer cannot be trusted to work element by element.

    It is judged by what it does. One of the same class and settings steps a matrix whole and alone, others step the
    same numbers split into flat pieces, some beside other tensors. After each step values and state must have the same
    bits, and what the groups hold must be the same. The optimizer itself, its state and the random number generators
    are left alone; what it keeps beside its groups, such as a limit, is given to those that are tried, if it is plain.
    No answer counts as a reason: it cannot be built, it fails, it works too much. What changes its
    nature after the first steps is not seen.

    Args:
        optimizer: The user's.
        device: Where to try it.
        settings: What to try in the place of its groups' own settings.

    Returns:
        A clause to go on "because" with, or None if it works element by element.
    """
    kind: Any = type(optimizer)
    try:
        groups = dict.fromkeys(_Group.of(group, optimizer.defaults, settings) for group in optimizer.param_groups)
        kept = {name: value for name, value in vars(optimizer).items() if name not in _held_by_all()}
        about = _Settings.of(optimizer.defaults), _Settings.of(kept)
        try:
            return _verdict(kind, *about, tuple(groups), device)
        finally:
            for each in (*about, *(group.settings for group in groups)):
                each.values.clear()  # the cache outlives optimizers, and what they keep
    except Exception as error:  # noqa: BLE001 - whatever strangers' settings raise, they cannot be tried
        return f"its settings cannot be tried out ({named(error)})"


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Settings of an optimizer that compare by their text, so that verdicts can be cached."""

    text: str
    values: dict[str, Any] = dataclasses.field(compare=False)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> _Settings:
        return cls(repr(sorted((name, repr(value)) for name, value in values.items())), dict(values))


@dataclasses.dataclass(frozen=True)
class _Group:
    """A group's settings, and the shapes to try them on."""

    settings: _Settings
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, group: Mapping[str, Any], defaults: Mapping[str, Any], changed: Mapping[str, Any]) -> _Group:
        tried = {name: value for name, value in group.items() if name not in _BOOKKEEPING}
        more_dims = sorted({min(each.dim(), 6) for each in group["params"]} - {0, 1, 2})
        return cls(
            _Settings.of(tried | _rate(group, defaults) | dict(changed)),
            (_MATRIX, *((8, 9, *[2] * (dims - 3), 16 >> (dims - 3)) for dims in more_dims)),
        )


def _rate(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Find a learning rate other than zero, with which warm-ups begin: nothing would show what is done with it."""
    for rate in (group.get("lr"), group.get("initial_lr"), defaults.get("lr")):
        if isinstance(rate, (int, float, torch.Tensor)) and bool(rate != 0):
            return {"lr": rate}
    return {"lr": 1e-3} if "lr" in group else {}


@functools.lru_cache(maxsize=1024)
def _verdict(
    kind: Any, defaults: _Settings, kept: _Settings, groups: tuple[_Group, ...], device: torch.device
) -> str | None:
    settings = copy.deepcopy((defaults.values, [group.settings.values for group in groups]))
    try:
        with undisturbed(device):
            make = functools.partial(Trial, kind, *settings, kept=kept.values)
            return _difference(make, groups, _STEPS_OF_KNOWN if kind in KNOWN else _STEPS)
    except NoAnswer as reason:
        return str(reason)


def _difference(make: Callable[..., Trial], groups: Sequence[_Group], steps: int) -> str | None:
    """Step a whole and its pieces side by side, up to the first step after which they differ."""
    bounds = Bounds(len(groups))
    generator = torch.Generator("cpu").manual_seed(0)
    starts = [[_start(shape, generator) for shape in group.shapes] for group in groups]
    with bounds.around("it could not be tried out on a matrix of its own"):
        whole = make(starts, seed=0)
    pieces = []
    for number in range(len(_NEIGHBOURS)):
        with bounds.around(_CANNOT_STEP_PIECES):
            pieces.append(_Piece(make, number, starts))
    for step in range(steps):
        gradients = [[_gradient(step, each.detach(), generator) for each in group] for group in whole.parameters]
        with bounds.around("it could not be tried out on a matrix of its own"):
            whole.step(gradients)
        for piece in pieces:
            with bounds.around(_CANNOT_STEP_PIECES):
                piece.step(gradients, _SCALES[step % len(_SCALES)])
            reason = piece.difference(whole)
            if reason is not None:
                return reason
    return None


def _random(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Draw the same numbers on every device."""
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


def _start(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Draw values of a tensor; zeros among them show the slightest step."""
    start = _random(shape, generator)
    start.view(-1)[::7] = 0.0
    return start


def _gradient(step: int, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw a gradient: almost at right angles to each row, as where a norm follows; along the rows; or neither."""
    gradient = _random(values.shape, generator)
    rows, row = gradient.flatten(1), values.flatten(1)
    unit = row / row.square().mean(1, keepdim=True).sqrt()
    if step % 3 == 0:
        rows += (1e-3 - (rows * unit).mean(1, keepdim=True)) * unit
    elif step % 3 == 1:
        rows += 3 * unit
    return gradient * _SCALES[step % len(_SCALES)]


class _Piece:
    """One flat piece of each watched tensor, stepped with its neighbours."""

    def __init__(self, make: Callable[..., Trial], number: int, whole: Sequence[Sequence[torch.Tensor]]) -> None:
        self._number = number
        self._before, self._after, self._scale = _NEIGHBOURS[number]
        self._generator = torch.Generator("cpu").manual_seed(1 + number)
        self._trial = make(self._with_neighbours(whole, 1.0), seed=1 + number)

    def step(self, gradients: Sequence[Sequence[torch.Tensor]], scale: float) -> None:
        """Step by the same gradients as the whole, of this size."""
        self._trial.step(self._with_neighbours(gradients, self._scale * scale))

    def difference(self, whole: Trial) -> str | None:
        """Return what is no longer as it is with the whole, as a clause; None if all is."""
        for parameters, of_whole in zip(self._trial.parameters, whole.parameters, strict=True):
            watched = parameters[len(self._before) : len(parameters) - len(self._after)]
            for piece, parameter in zip(watched, of_whole, strict=True):
                same = functools.partial(_same, cut=functools.partial(self._slice, like=parameter))
                if not same(parameter.detach(), piece.detach()):
                    return _WITH_NEIGHBOURS if self._before or self._after else _IN_PIECES
                if not same(whole.optimizer.state.get(parameter), self._trial.optimizer.state.get(piece)):
                    return _STATE
        return None if _same(_shared(whole.optimizer), _shared(self._trial.optimizer)) else _SHARED

    def _with_neighbours(self, tensors: Sequence[Sequence[torch.Tensor]], scale: float) -> list[list[torch.Tensor]]:
        return [
            [*self._fillers(self._before, scale), *map(self._slice, of_group), *self._fillers(self._after, scale)]
            for of_group in tensors
        ]

    def _fillers(self, shapes: Sequence[Sequence[int]], scale: float) -> list[torch.Tensor]:
        return [_random(shape, self._generator) * scale for shape in shapes]

    def _slice(self, tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return this piece of a tensor, or all of one that has another size than its parameter."""
        if like is not None and tensor.numel() != like.numel():
            return tensor
        return torch.split(tensor.detach().flatten(), _PIECES[tensor.numel()])[self._number]


@functools.cache
def _held_by_all() -> frozenset[str]:
    """List what every optimizer has, or schedulers and setup give it, beside its class's own; hooks are not run."""
    # Not while this is imported: torch's first optimizer imports its compiler, which takes longer than all else.
    return frozenset({*vars(torch.optim.SGD([torch.zeros(())])), "step", "zero_grad", "_step_count", "_opt_called"})


def _shared(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what an optimizer keeps beside the state of single parameters."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return [*groups, {name: value for name, value in optimizer.state.items() if not isinstance(name, torch.Tensor)}]


def _same(whole: Any, piece: Any, cut: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> bool:
    """Compare, tensors bit for bit, what is kept for a whole, a piece of it, and what is kept for a piece."""
    if type(whole) is not type(piece):
        return False
    if isinstance(whole, torch.Tensor):
        whole = cut(whole)
        return whole.shape == piece.shape and _equal(whole, piece)
    if isinstance(whole, Mapping):
        return whole.keys() == piece.keys() and all(_same(whole[name], piece[name], cut) for name in whole)
    if isinstance(whole, (list, tuple, collections.deque)):
        return len(whole) == len(piece) and all(_same(*pair, cut) for pair in zip(whole, piece, strict=True))
    return (
        whole is piece or bool(whole == piece) or (hasattr(whole, "__dict__") and _same(vars(whole), vars(piece), cut))
    )


def _equal(whole: torch.Tensor, piece: torch.Tensor) -> bool:
    """Compare numbers; what settings of no sense blow up to no number must be none in both."""
    return torch.equal(whole, piece) or bool(((whole == piece) | (whole.isnan() & piece.isnan())).all())
