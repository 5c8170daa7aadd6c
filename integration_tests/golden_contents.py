"""What every golden checkpoint holds: formulas of names and places, so that only the files themselves are kept."""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import nn

from shard_core import PrecisionPolicy

if TYPE_CHECKING:
    from golden_list import Golden

SAMPLES, GLOBAL_BATCH, LOADER_SEED = 24, 4, 5
EPOCH, BATCHES_TAKEN = 1, 2
SCALER = {"factor": 4096.0, "clean_steps": 7}
_SCHEDULED = 3


class Model(nn.Module):
    """A tied weight, a frozen layer, sizes that no number of ranks divides, one element, no dimension, buffers."""

    def __init__(self, *, freezes: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.expand = nn.Linear(5, 10)
        self.contract = nn.Linear(10, 5)
        self.fixed = nn.ModuleList([nn.Linear(5, 3).requires_grad_(False)] if freezes else [])
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.randn(1))
        self.temperature = nn.Parameter(torch.randn(()))
        self.register_buffer("scale", torch.rand(5))
        self.register_buffer("shift", torch.ones(5), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits; a golden checkpoint has never been through it."""
        hidden = self.contract(self.expand(self.embedding(tokens))) * self.scale + self.shift
        return self.head(hidden * self.gain * self.temperature)


def optimizers_over(model: Model) -> dict[str, torch.optim.Optimizer]:
    """Build AdamW over matrices and their biases, in two groups, and SGD over the rest."""
    layers = (model.expand, model.contract)
    adamw = torch.optim.AdamW(
        [
            {"params": [model.embedding.weight, *(layer.weight for layer in layers)], "weight_decay": 0.25},
            {"params": [layer.bias for layer in layers], "lr": 0.0625, "betas": (0.5, 0.75), "amsgrad": True},
        ],
        lr=0.5,
        weight_decay=0.0,
    )
    sgd = torch.optim.SGD([model.head.bias, model.gain, model.temperature], lr=0.125, momentum=0.5, nesterov=True)
    return {"adamw": adamw, "sgd": sgd}


def formula(name: str, like: torch.Tensor, least: float = -1.0) -> torch.Tensor:
    """Compute the elements of a tensor from its name: seven bits each, which every floating-point dtype holds."""
    places = torch.arange(like.numel()).reshape(like.shape)
    numbers = (places * 5 + zlib.crc32(name.encode())) % 127
    if like.dtype == torch.bool:
        return numbers % 2 == 0
    return (numbers / 64 + least if like.is_floating_point() else numbers).to(like.dtype)


def slots_of(optimizer: torch.optim.Optimizer, model: Model) -> dict[str, dict[str, torch.Tensor]]:
    """Compute an optimizer's state by parameter; every parameter has a count of steps of its own."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {}
    for group in optimizer.param_groups:
        slots = ("momentum_buffer",) if "momentum" in group else ("exp_avg", "exp_avg_sq")
        for place, parameter in enumerate(group["params"]):
            name = names[parameter]
            all_slots = (*slots, "max_exp_avg_sq") if group.get("amsgrad") else slots
            state[name] = {slot: formula(f"{name}.{slot}", parameter, least=0.0) for slot in all_slots}
            if "momentum" not in group:
                state[name]["step"] = torch.tensor(3.0 + place)
    return state


def plain(golden: Golden) -> tuple[Model, dict[str, torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """Build in plain PyTorch what a golden checkpoint holds of model, optimizers and scheduler."""
    policy = golden.stored if isinstance(golden.stored, PrecisionPolicy) else None
    name = golden.precision.removesuffix("-true")
    dtype = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}.get(name, torch.float32)
    model = Model(freezes=golden.freezes).to(torch.float32 if policy else dtype)
    with torch.no_grad():
        for key, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(formula(key.replace("head.weight", "embedding.weight"), tensor))
    if policy:
        model.scale = model.scale.to(torch.bfloat16)
    optimizers = optimizers_over(model)
    for optimizer in optimizers.values():
        state = slots_of(optimizer, model)
        for key, parameter in model.named_parameters():
            if key in state:
                optimizer.state[parameter] = state[key]
    scheduler = scheduler_of(optimizers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nothing is stepped here
        for _ in range(_SCHEDULED):
            scheduler.step()
    return model, optimizers, scheduler


def scheduler_of(optimizers: Mapping[str, torch.optim.Optimizer]) -> torch.optim.lr_scheduler.LRScheduler:
    """Halve AdamW's learning rates after every second step."""
    return torch.optim.lr_scheduler.StepLR(optimizers["adamw"], 2, gamma=0.5)


class Tally:
    """An object of a user's that hands out its state: a tensor of every dtype that files can hold."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def tally(golden: Golden) -> dict[str, Any]:
    """Compute tensors among a user's values; to save room, one checkpoint alone has one of every dtype."""
    dtypes = (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("float16", "bfloat16", "float32", "float64", "complex64"),
    )
    numbers = torch.tensor([1.0, 2.0, 0.5, 4.0, 8.0])
    each = {name: numbers.to(getattr(torch, name)) for name in dtypes if golden.streams}
    return {"every dtype": each, "none": torch.zeros(0, 3), "one": [torch.tensor(-1.5, dtype=torch.bfloat16)]}


def values() -> dict[str, Any]:
    """Compute the plain values."""
    return {
        "step": 17,
        "best": float("-inf"),
        "notes": {"nested": [1, 2.5, None, True, "ä ~ $"], 3: (1, (2,)), "$odd": {}, "empty": []},
    }


def next_samples() -> dict[str, list[int]]:
    """Compute by torch alone which samples have not come yet; the last batch is filled up from the epoch's start."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(LOADER_SEED + EPOCH)).tolist()
    taken = BATCHES_TAKEN * GLOBAL_BATCH
    odd = list(range(1, SAMPLES, 2))
    return {
        "loader": sorted(order[taken:]),
        "sampled": sorted(odd[taken:]),
        "stream": list(range(2 * BATCHES_TAKEN, 2 * BATCHES_TAKEN + 20)),
    }


def seed_generators(rank: int) -> None:
    """Set a rank's generators so that formulas can follow, each with a number of Gauss' kept for the next call."""
    random.seed(100 + rank)
    random.gauss(0, 1)
    numpy.random.seed(200 + rank)
    numpy.random.normal()
    torch.manual_seed(300 + rank)
    torch.rand(3)


def draw() -> dict[str, float]:
    """Draw from every generator of this process."""
    return {
        "python gauss": random.gauss(0, 1),
        "python": random.random(),
        "numpy normal": float(numpy.random.normal()),
        "numpy": float(numpy.random.random()),
        "torch": torch.rand(()).item(),
    }


def drawn_after_seeding(rank: int) -> dict[str, float]:
    """Compute what a rank of a golden checkpoint draws next, in generators of their own."""
    python, legacy = random.Random(100 + rank), numpy.random.RandomState(200 + rank)
    generator = torch.Generator().manual_seed(300 + rank)
    python.gauss(0, 1), legacy.normal(), torch.rand(3, generator=generator)
    return {
        "python gauss": python.gauss(0, 1),
        "python": python.random(),
        "numpy normal": float(legacy.normal()),
        "numpy": float(legacy.random_sample()),
        "torch": torch.rand((), generator=generator).item(),
    }
