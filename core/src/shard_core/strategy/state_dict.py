"""State dicts, gradients and full parameters of what is sharded over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shard_core.checkpoint.keys import OPTIMIZER, is_slot, name_in, slot_in
from shard_core.checkpoint.state.gather import full_tensors
from shard_core.strategy.collectives import StrategyCollectives

if TYPE_CHECKING:
    from shard_core.checkpoint.state.training_state import TrainingState

#: What a gradient is called among the state of an optimizer.
_SLOT = "gradient"


class StrategyStateDict(StrategyCollectives):
    """Returns the weights, the gradients and the optimizer state of a run, full or this rank's shards."""

    def module_state_dict(self, module: torch.nn.Module, full: bool = True) -> dict[str, torch.Tensor]:
        """Return a module's parameters and persistent buffers under the user's own names.

        Every rank calls this if ``full``; what is on a rank it may ask for alone.

        Args:
            module: What setup returned.
            full: Full tensors in host memory on rank 0, which training leaves alone, and nothing on other ranks; False
                for what is on this rank.

        Returns:
            Tensors by name; one that stands here in several boxes under ``name[begin:end,...]``, box by box.
        """
        known = self._registry.of(module)
        state = self.engine_state({"model": known.module}, {})
        if not full:
            return {name_in(label): view for label, view in _local_tensors(state)}
        whole = full_tensors(state, self.collectives)
        return {name_in(key): tensor for key, tensor in whole if self.is_global_zero}

    def module_gradients(self, module: torch.nn.Module, full: bool = True) -> dict[str, torch.Tensor]:
        """Return a module's gradients as a step would take them now, under the user's own parameter names.

        They are averaged over data-parallel ranks, divided by denominators, unscaled, and clipped if they were.
        Nothing is changed by it: more micro-batches may follow. Every rank calls this, also with ``full=False``.

        Args:
            module: What setup returned.
            full: Full tensors in host memory on rank 0 and nothing on other ranks; False for what
                is on this rank.

        Returns:
            Copies by name, dense and in the dtype the engine keeps gradients in, named as by ``module_state_dict``.
            Parameters that no backward has reached are left out, and those that no optimizer steps, if the module has
            one.

        Raises:
            SetupError: If the last backward was inside ``no_backward_sync``.
            InvalidOption: If the denominators of the step add up to nothing.
        """
        known = self._registry.of(module)
        known.check_averaged()
        factors: dict[torch.Tensor, float] = {}
        owners = known.optimizers or {_Gradients(known.module.parameters(), {}): known.unstepped}
        for optimizer, accumulation in owners.items():
            self.engine_check_averaged(optimizer)
            self.engine_gradients(optimizer)  # takes in what users have done, and completes what is a pending sum
            factor = accumulation.factor(self.collectives, self._data)
            factors.update((parameter, factor) for group in optimizer.param_groups for parameter in group["params"])
        # The loss may have left a parameter out on this rank alone.
        mine = [place for place, parameter in enumerate(factors) if parameter.grad is not None]
        reached = {place for theirs in self.collectives.gather_objects(mine) for place in theirs}
        if not reached:
            return {}
        parameters = [parameter for place, parameter in enumerate(factors) if place in reached]
        gradients = _Gradients(parameters, {})
        gradients.take()
        state = self._exchanged_state({"model": known.module}, {"gradients": gradients})
        factor_of = {
            name: factors[parameter]
            for name, parameter in zip(state.optimizers()["gradients"].names, parameters, strict=True)
        }
        found = {}
        for key, tensor in full_tensors(state, self.collectives, OPTIMIZER) if full else _local_tensors(state):
            if is_slot(key):
                name, slot = slot_in(key)
                if self.is_global_zero or not full:
                    found[name + slot.removeprefix(_SLOT)] = tensor * factor_of[name]
        tied = {name_in(alias): name_in(name) for alias, name in state.aliases().items()}
        return found | {alias: found[name] for alias, name in tied.items() if full and name in found}

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer, full: bool = True) -> dict[str, Any]:
        """Return an optimizer's state by parameter name, as torch's own state dicts do; every rank calls this.

        Args:
            optimizer: One that was set up.
            full: Full tensors in host memory on rank 0, which training leaves alone, and an empty dict on other ranks;
                False for what is on this rank.

        Returns:
            ``{"state": {name: {slot: value}}, "param_groups": [{"params": [name, ...], ...}]}``.
        """
        known = self._registry.owner(optimizer)
        state = self._exchanged_state({"model": known.module}, {"optimizer": optimizer})
        record = state.optimizers()["optimizer"]
        slots: dict[str, dict[str, Any]] = {}
        pairs = full_tensors(state, self.collectives, prefix=OPTIMIZER) if full else _local_tensors(state)
        for key, tensor in pairs:
            if is_slot(key):
                name, slot = slot_in(key)
                slots.setdefault(name, {})[slot] = tensor
        if full and not self.is_global_zero:
            return {}
        for name, scalars in record.scalars.items():
            slots.setdefault(name, {}).update(
                {slot: _on_host(value) for slot, value in scalars.items()} if full else scalars
            )
        return {"state": slots, "param_groups": [dict(group) for group in record.groups]}

    def full_parameters(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a module's full parameters and buffers in host memory, a few at a time; every rank iterates to the end.

        Args:
            module: What setup returned.

        Yields:
            The user's name and the full tensor; memory is that of the largest, or of 16 MiB of small ones.
        """
        state = self.engine_state({"model": self._registry.of(module).module}, {})
        for key, tensor in full_tensors(state, self.collectives):
            yield name_in(key), tensor

    def _exchanged_state(
        self, modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> TrainingState:
        """Describe modules and optimizers, with what ranks must know of one another; every rank calls this."""
        state = self.engine_state(modules, optimizers)
        state.exchange(self.collectives)
        return state


class _Gradients(torch.optim.Optimizer):
    """Holds gradients as optimizers hold state, laid out like parameters, for engines to describe; it never steps."""

    def take(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter.detach())
            self.state[parameter][_SLOT] = gradient.to_dense() if gradient.is_sparse else gradient


def _on_host(value: Any) -> Any:
    """Return a copy in host memory, where some optimizers count on the device; what is no tensor as it is."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _local_tensors(state: TrainingState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's tensors by key; with extents where a tensor has several boxes here."""
    shards = state.shards()
    boxes = Counter(shard.key for shard in shards)
    for shard in shards:
        yield shard.key if boxes[shard.key] == 1 else shard.label, shard.view
