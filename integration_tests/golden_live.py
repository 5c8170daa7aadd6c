"""A golden checkpoint's state under a strategy: to be written once, and read for ever."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from golden_contents import (
    BATCHES_TAKEN,
    EPOCH,
    GLOBAL_BATCH,
    LOADER_SEED,
    SAMPLES,
    SCALER,
    Model,
    Tally,
    draw,
    optimizers_over,
    plain,
    scheduler_of,
    seed_generators,
    tally,
    values,
)
from golden_list import RUN, RUN_STEPS, Golden
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from shard_core import Strategy, get_strategy
from shard_core.testing.bits import Bits, bits_of

_BEFORE_LOADING = 123.0


class _Odd(Sampler[int]):
    """A sampler of the user's own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, SAMPLES, 2))

    def __len__(self) -> int:
        return SAMPLES // 2


class _Stream(IterableDataset[int]):
    """Gives each rank its share by itself, and says where it is."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._next, self._stride = rank, world_size

    def __iter__(self) -> Iterator[int]:
        while self._next < 100:
            self._next += self._stride
            yield self._next - self._stride

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]


class _StatefulLoader(DataLoader[Any]):
    """A loader that knows the position, as torchdata's does."""

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.dataset.load_state_dict(state)


class Live:
    """A state under a strategy, to be saved or loaded into.

    Args:
        strategy: Started.
        golden: What is saved or loaded.
    """

    def __init__(self, strategy: Strategy, golden: Golden) -> None:
        self._strategy = strategy
        strategy.seed_everything(1)
        with strategy.module_init_context():
            model = Model(freezes=golden.freezes)
        optimizers = optimizers_over(model)
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                group |= dict.fromkeys(("lr", "weight_decay"), _BEFORE_LOADING)
        self.model, stepped = strategy.setup_module_and_optimizers(model, list(optimizers.values()))
        self.optimizers = dict(zip(optimizers, stepped, strict=True))
        self.scheduler = scheduler_of(self.optimizers)
        self.tally = Tally()
        self.loaders = {"loader": self._shared(shuffle=True), "sampled": self._shared(sampler=_Odd())}
        if golden.streams and strategy.world_size == golden.size:
            share = strategy.distributed_sampler_kwargs
            stream = _Stream(share["rank"], share["num_replicas"])
            self.loaders["stream"] = strategy.process_dataloader(_StatefulLoader(stream, batch_size=None))
        self.state = {
            "model": self.model,
            **self.optimizers,
            "scheduler": self.scheduler,
            "tally": self.tally,
            **self.loaders,
            **dict.fromkeys(values()),
        }

    def _shared(self, **order: Any) -> Any:
        generator = torch.Generator().manual_seed(LOADER_SEED)
        data = TensorDataset(torch.arange(SAMPLES))
        loader = DataLoader(data, batch_size=GLOBAL_BATCH, generator=generator, **order)
        return self._strategy.process_dataloader(loader, split_batches=True)

    def without_loaders(self) -> dict[str, Any]:
        """Remove the data's position from the state."""
        return {key: value for key, value in self.state.items() if key not in self.loaders}

    def take_batches(self) -> None:
        """Advance to the middle of an epoch that is not the first."""
        for loader in self.loaders.values():
            loader.set_epoch(EPOCH)
            for _, _ in zip(range(BATCHES_TAKEN), loader, strict=False):
                pass

    def next_samples(self) -> dict[str, list[int]]:
        """List the samples that all ranks are given next, up to the end of the epoch or ten of them."""
        found = {}
        for name, loader in self.loaders.items():
            own = [int(sample) for batch, _ in zip(loader, range(10), strict=False) for sample in _flat(batch)]
            shares = self._strategy.collectives.gather_objects(own)
            found[name] = sorted(sample for share in shares for sample in share)
        return found


def _flat(batch: Any) -> list[Any]:
    return [batch] if isinstance(batch, int) else batch[0].tolist()


def write_source(golden: Golden, path: Path) -> None:
    """Save under ``single`` what the formulas say, filled by torch's own ``load_state_dict``."""
    precision = "32-true" if golden.precision.endswith("mixed") else golden.stored
    with get_strategy("single", accelerator="cpu", precision=precision) as strategy:
        live = Live(strategy, golden)
        model, optimizers, scheduler = plain(golden)
        strategy.unwrap(live.model).load_state_dict(model.state_dict())
        for name, optimizer in optimizers.items():
            live.optimizers[name].load_state_dict(optimizer.state_dict())
        live.scheduler.load_state_dict(scheduler.state_dict())
        live.tally.state = tally(golden)
        strategy.save_checkpoint(
            path, {key: live.state[key] for key in live.state if key not in live.loaders} | values()
        )


def write(golden: Golden, source: Path, path: Path) -> None:
    """Load what ``single`` saved under another strategy, go on to where formulas follow, and save."""
    with get_strategy(golden.strategy, precision=golden.precision, **golden.options) as strategy:
        live = Live(strategy, golden)
        filled = live.without_loaders()
        strategy.load_checkpoint(source, filled)
        state = {**live.state, **filled}
        if golden.replaces:
            strategy.save_checkpoint(path, {**state, "step": -1})
        live.take_batches()
        if strategy.precision.state_dict():
            strategy.precision.load_state_dict(SCALER)
        seed_generators(strategy.global_rank)
        strategy.save_checkpoint(path, state, state_dict_type=golden.form, blocking=not golden.replaces).wait()


def write_run() -> None:
    """Save a run's folder."""
    with get_strategy("single") as strategy:
        for step in RUN_STEPS:
            strategy.save_checkpoint(RUN / f"step-{step}", {"step": step})


def newest_of_run(strategy_name: str) -> tuple[Any, dict[str, Any]]:
    """Find the newest checkpoint in the golden folder of a run, and read what is in it."""
    with get_strategy(strategy_name) as strategy:
        path = strategy.latest_checkpoint(RUN)
        return path, strategy.load_checkpoint(path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What one rank found in a golden checkpoint.

    Attributes:
        left: What nobody asked for.
        bits: Every tensor of the model and its optimizers.
        tied: Whether the tied weight is one parameter.
        frozen: The names of the parameters that are not trained.
        groups: The hyper-parameters of each group, by optimizer.
        scheduler: How often the scheduler was stepped, and the learning rates it says.
        rates_to_come: The learning rates after one more step of it.
        plain: The plain values.
        tally: The state of the user's object.
        scaler: The state of the precision.
        drawn: The next random numbers.
        samples: The next samples of all ranks.
    """

    left: dict[str, Any]
    bits: Bits
    tied: bool
    frozen: set[str]
    groups: dict[str, list[dict[str, Any]]]
    scheduler: tuple[int, list[float]]
    rates_to_come: list[float]
    plain: dict[str, Any]
    tally: dict[str, Any]
    scaler: dict[str, Any]
    drawn: dict[str, float]
    samples: dict[str, list[int]]


def read(strategy_name: str, golden: Golden) -> Reading:
    """Load a golden checkpoint under a strategy, on every rank of a running world."""
    with get_strategy(strategy_name, precision=golden.stored) as strategy:
        live = Live(strategy, golden)
        left = strategy.load_checkpoint(golden.path, live.state)
        drawn = draw()
        model = strategy.unwrap(live.model)
        bits: Bits = {}
        for optimizer in live.optimizers.values():
            bits |= bits_of(strategy, live.model, optimizer)
        groups = {name: hyper_parameters(optimizer) for name, optimizer in live.optimizers.items()}
        scheduled = live.scheduler.last_epoch, live.scheduler.get_last_lr()
        return Reading(
            left=left,
            bits=bits,
            tied=model.head.weight is model.embedding.weight,
            frozen={name for name, parameter in model.named_parameters() if not parameter.requires_grad},
            groups=groups,
            scheduler=scheduled,
            rates_to_come=rates_to_come(live.scheduler),
            plain={key: live.state[key] for key in values()},
            tally=live.tally.state,
            scaler=strategy.precision.state_dict(),
            drawn=drawn,
            samples=live.next_samples(),
        )


def hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Copy what stands in each group but its parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def rates_to_come(scheduler: torch.optim.lr_scheduler.LRScheduler) -> list[float]:
    """Step a scheduler, and return what comes of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the optimizer is not stepped here
        scheduler.step()
    return scheduler.get_last_lr()
