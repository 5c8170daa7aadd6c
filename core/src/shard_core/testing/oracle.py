"""The truth strategies are held to: training in plain PyTorch, in one process, with nothing of ours."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """What a training run went through and where it ended.

    Attributes:
        losses: The mean loss of each optimizer step.
        norms: The global gradient norm of each step, before clipping.
        weights: Parameters and persistent buffers at the end; a tied one stands under each of its names.
        optimizer_state: What the optimizer keeps for each parameter, by the parameter's first name.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    optimizer_state: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


def train(
    make_model: Callable[[], torch.nn.Module],
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
    batches: Sequence[Any],
    *,
    loss_of: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    norm_type: float = 2.0,
    autocast_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Trajectory:
    """Train one model on global batches.

    Args:
        make_model: Builds the model; called right after the seed is set.
        make_optimizer: Builds the optimizer for it.
        batches: Global micro-batches, ``accumulate`` of them for each step.
        loss_of: Makes the mean loss over a batch of model and batch; None calls ``model(*batch)``.
        accumulate: How many micro-batches one step averages over.
        clip: The largest gradient norm, or ``None`` for no clipping.
        norm_type: Which norm.
        autocast_dtype: What autocast computes in, or ``None`` for no autocast.
        seed: What the random number generators start from.

    Returns:
        The run, its tensors detached and copied.
    """
    torch.manual_seed(seed)
    model = make_model()
    optimizer = make_optimizer(model)
    losses, norms = [], []
    for start in range(0, len(batches), accumulate):
        total = 0.0
        for batch in batches[start : start + accumulate]:
            with _autocast(autocast_dtype):
                loss = (model(*batch) if loss_of is None else loss_of(model, batch)) / accumulate
            loss.backward()
            total += loss.item()
        losses.append(total)
        limit = math.inf if clip is None else clip
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trajectory(
        losses=losses,
        norms=norms,
        weights={name: tensor.clone() for name, tensor in model.state_dict().items()},
        optimizer_state=_state_by_name(model, optimizer),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distance:
    """How far a run is from the oracle's, in relative differences.

    Attributes:
        loss: The largest of any step's loss.
        norm: The largest of any step's gradient norm.
        weights: That of the final weights, all taken as one vector, in the Euclidean norm.
    """

    loss: float
    norm: float
    weights: float


def distance(actual: Trajectory, expected: Trajectory) -> Distance:
    """Measure what ``assert_same`` bounds.

    Args:
        actual: The run to judge.
        expected: The oracle's, of as many steps.

    Raises:
        AssertionError: If names, shapes, dtypes or integers differ.
    """
    _assert_same_layout(actual.weights, expected.weights)
    truths = {name: truth.double() for name, truth in expected.weights.items() if truth.is_floating_point()}
    apart = math.hypot(*(_distance(actual.weights[name].double(), truth, 2.0) for name, truth in truths.items()))
    return Distance(
        loss=max(_relative(*pair) for pair in zip(actual.losses, expected.losses, strict=True)),
        norm=max(_relative(*pair) for pair in zip(actual.norms, expected.norms, strict=True)),
        weights=apart / math.hypot(*(_size(truth, 2.0) for truth in truths.values())),
    )


def assert_same(
    actual: Trajectory,
    expected: Trajectory,
    *,
    loss: float = 1e-6,
    norm: float = 2e-6,
    weights: float = 1e-5,
    elementwise: bool = False,
) -> None:
    """Compare a run with the oracle's; the message names the first thing that differs and by how much.

    Args:
        actual: The run to judge.
        expected: The oracle's.
        loss: Largest relative difference of a step's loss.
        norm: Largest relative difference of a step's gradient norm.
        weights: Largest difference of the final weights, relative to their size.
        elementwise: Whether ``weights`` bounds every element, relative to the largest of its parameter,
            rather than the Euclidean norm over the whole model.

    Raises:
        AssertionError: If anything differs by more than its bound.
    """
    assert_same_numbers("loss", actual.losses, expected.losses, loss)
    assert_same_numbers("gradient norm", actual.norms, expected.norms, norm)
    assert_same_weights(actual.weights, expected.weights, weights, elementwise=elementwise)


def assert_same_numbers(what: str, actual: Sequence[float], expected: Sequence[float], bound: float) -> None:
    """Compare one number per step with the oracle's.

    Args:
        what: What the numbers are, for the message.
        actual: The numbers to judge.
        expected: The oracle's.
        bound: Largest relative difference.

    Raises:
        AssertionError: If there are more or fewer, or one differs by more than ``bound``.

    Example:
        >>> assert_same_numbers("loss", [1.0, 0.5], [1.0, 0.4], 1e-6)
        Traceback (most recent call last):
        ...
        AssertionError: loss of step 1 is 0.5, the oracle's is 0.4: a relative difference of 2.5e-01, \
allowed 1e-06
    """
    if len(actual) != len(expected):
        raise AssertionError(f"{what} has {len(actual)} steps, the oracle's has {len(expected)}")
    for step, (mine, truth) in enumerate(zip(actual, expected, strict=True)):
        difference = _relative(mine, truth)
        if not difference <= bound and mine != truth:
            raise AssertionError(
                f"{what} of step {step} is {mine!r}, the oracle's is {truth!r}: "
                f"a relative difference of {difference:.1e}, allowed {bound:.0e}"
            )


def assert_same_weights(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    bound: float,
    *,
    elementwise: bool = False,
) -> None:
    """Compare final weights with the oracle's; a bound of 0 asks for equal bits, as do integers always.

    Args:
        actual: The weights to judge, by name.
        expected: The oracle's.
        bound: Largest difference, relative to the size of the weights.
        elementwise: Whether the bound holds for every element, relative to the largest of its parameter,
            rather than for the Euclidean norm over the whole model.

    Raises:
        AssertionError: If names, shapes, dtypes or values differ.
    """
    _assert_same_layout(actual, expected)
    pairs = {name: (_exactly(actual[name]), _exactly(truth)) for name, truth in expected.items() if _is_rounded(truth)}
    order = math.inf if elementwise else 2.0
    differences = {name: _distance(mine, truth, order) for name, (mine, truth) in pairs.items()}
    sizes = {name: _size(truth, order) for name, (_, truth) in pairs.items()}
    if not elementwise:
        difference, size = math.hypot(*differences.values()), math.hypot(*sizes.values())
        if difference <= bound * size:
            return
    for name, (mine, truth) in pairs.items():
        if not differences[name] <= bound * sizes[name]:
            relative = differences[name] / sizes[name] if sizes[name] else math.inf
            place = int((mine - truth).abs().nan_to_num(math.inf).argmax())
            raise AssertionError(
                f"{name!r} is the first parameter that differs: by {relative:.1e} relative, allowed {bound:.0e}; "
                f"most at element {place}: {mine.flatten()[place].item()!r}, "
                f"the oracle's is {truth.flatten()[place].item()!r}"
            )


def _assert_same_layout(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    missing, extra = [n for n in expected if n not in actual], [n for n in actual if n not in expected]
    if missing or extra:
        raise AssertionError(f"the names of the weights differ: missing {missing}, not the oracle's {extra}")
    for name, truth in expected.items():
        mine = actual[name]
        if (mine.shape, mine.dtype) != (truth.shape, truth.dtype):
            raise AssertionError(
                f"{name!r} is {mine.dtype} {tuple(mine.shape)}, the oracle's is {truth.dtype} {tuple(truth.shape)}"
            )
        if not _is_rounded(truth) and not torch.equal(mine, truth):
            raise AssertionError(f"{name!r} is {mine.tolist()}, the oracle's is {truth.tolist()}")


def _is_rounded(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _exactly(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _distance(mine: torch.Tensor, truth: torch.Tensor, order: float) -> float:
    return 0.0 if torch.equal(mine, truth) else _size(mine - truth, order)


def _size(tensor: torch.Tensor, order: float) -> float:
    return torch.linalg.vector_norm(tensor, order).item() if tensor.numel() else 0.0


def _relative(mine: float, truth: float) -> float:
    return abs(mine - truth) / abs(truth) if truth else abs(mine)


def _autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def _state_by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {
        name: {
            key: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for key, value in optimizer.state[parameter].items()
        }
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }
