"""Random number generators: seeds, one stream for initial weights, one per data rank for dropout, and states."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from shard_core.coordinator import Coordinator

#: The version of the state that ``random.getstate`` returns, since Python 3.2.
_PYTHON_VERSION = 3


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, of the CPU and of every accelerator.

    Args:
        seed: From 0 to 2**32 - 1.

    Example:
        >>> seed_everything(7); first = torch.rand(())
        >>> seed_everything(7); bool(torch.rand(()) == first)
        True
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def derived_seed(seed: int, *parts: int) -> int:
    """Derive a seed that differs for every combination of parts, alike on every machine.

    Args:
        seed: Where it all starts from.
        parts: For example a data-parallel rank.

    Returns:
        A seed of 63 bits.

    Example:
        >>> derived_seed(7, 1) == derived_seed(7, 1), derived_seed(7, 1) == derived_seed(7, 2)
        (True, False)
    """
    text = ",".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def shared_generator(coordinator: Coordinator) -> Iterator[None]:
    """Set all ranks to draw rank 0's random numbers inside, and restore their own after.

    Args:
        coordinator: Of all ranks.
    """
    own = torch.get_rng_state()
    shared = coordinator.broadcast_object(own)
    if coordinator.rank == 0 or torch.equal(own, shared):
        yield
        return
    torch.set_rng_state(shared)
    try:
        yield
    finally:
        torch.set_rng_state(own)


def seed_data_rank(data_rank: int) -> None:
    """Seed torch's generator with a number of this data-parallel rank's own, for dropout and the like.

    The first rank's stream goes on as in a single process.

    Args:
        data_rank: This rank's place among the data-parallel ranks.
    """
    if data_rank > 0:
        torch.manual_seed(derived_seed(torch.initial_seed(), data_rank))


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of this process's generators, of Python, NumPy, torch and a CUDA device.

    Args:
        device: This rank's.

    Returns:
        Tensors by generator, in host memory, of the same shapes on every rank.
    """
    _, words, gauss = random.getstate()
    mersenne = np.random.get_state(legacy=False)
    keys, position = mersenne["state"]["key"], mersenne["state"]["pos"]
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([*words, 0 if gauss is None else 1], dtype=torch.int64),
        "python_gauss": torch.tensor([gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, mersenne["has_gauss"]], dtype=torch.int64),
        "numpy_gauss": torch.tensor([mersenne["gauss"]], dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def check_generator_states(states: Mapping[str, object], device: torch.device) -> None:
    """Check that this process's generators accept states, without changing them.

    Args:
        states: What ``generator_states`` may have returned.
        device: This rank's.

    Raises:
        ValueError: Naming the first generator that cannot.
    """
    checked: dict[str, torch.Tensor] = {}
    for name, own in generator_states(device).items():
        state = states.get(name)
        if name == "cuda" and state is None:
            continue  # saved on a CPU
        if not isinstance(state, torch.Tensor) or (state.dtype, state.shape) != (own.dtype, own.shape):
            raise ValueError(f"{name!r} is no {own.dtype} tensor of shape {tuple(own.shape)}")
        checked[name] = state
    for name in ("python", "numpy"):
        *words, position, has_gauss = checked[name].tolist()
        # NumPy takes any position for granted, and would read beyond its words.
        if not all(0 <= word < 2**32 for word in words) or not 0 <= position <= len(words) or has_gauss not in (0, 1):
            raise ValueError(f"{name!r} holds numbers that its generator never has")
    for name in {"torch", "cuda"} & checked.keys():
        rehearsal = torch.Generator("cpu" if name == "torch" else device)
        try:
            rehearsal.set_state(checked[name])
        except RuntimeError as error:
            raise ValueError(f"{name!r} holds numbers that its generator never has") from error


def set_generator_states(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Set the states of this process's generators.

    Args:
        states: What ``generator_states`` returned.
        device: This rank's.
    """
    torch.set_rng_state(states["torch"])
    *words, has_gauss = states["python"].tolist()
    random.setstate((_PYTHON_VERSION, tuple(words), states["python_gauss"].item() if has_gauss else None))
    *keys, position, cached = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, cached, states["numpy_gauss"].item()))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    elif device.type == "cuda":  # saved on a CPU: it would draw again what it has drawn since this run began
        torch.cuda.manual_seed(derived_seed(0, *states["torch"].tolist()))
