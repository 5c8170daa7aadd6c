"""Training state on XLA devices: which boxes of which full tensors stand in this process, by way of host memory."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shard_core import CheckpointError
from shard_core.backend import HeldSlot, NamedState, Ownership, TensorShard, shards_of_range

if TYPE_CHECKING:
    from shard_core.backend import OptimizerRecord
    from shard_xla.strategy.module_tensors import ModuleTensors, Place


class DeviceState(NamedState):
    """The state of modules on XLA devices, fetched to the host when it is asked for, and pushed back after a load.

    Args:
        tensors: Those of modules by the user's names.
        optimizers: Optimizers over their parameters, by the user's names.
        zeros_like: Makes optimizer state of a parameter's layout, from it and a dtype; None for what torch makes.

    Raises:
        CheckpointError: If an optimizer steps what no module here has, or a module keeps what is no tensor.
    """

    holds_copies = True

    def __init__(
        self,
        tensors: Mapping[str, ModuleTensors],
        optimizers: Mapping[str, torch.optim.Optimizer],
        zeros_like: Callable[[torch.Tensor, torch.dtype], torch.Tensor] | None = None,
    ) -> None:
        for key, each in tensors.items():
            each.check_complete(key)
        self._tensors = tensors
        super().__init__(tensors, optimizers, zeros_like)

    def shards(self) -> list[TensorShard]:
        """Copy this process's boxes of every tensor to the host."""
        import torch_xla
        import torch_xla.core.xla_model as xm

        self.forget()  # a load may begin anew
        torch_xla.sync()  # one graph for all; each fetch would run a piece of its own
        xm.wait_device_ops()  # parts of a tensor that is still being computed cannot be asked for
        found: list[TensorShard] = []
        for module, each in self._tensors.items():
            for name, place in each.places.items():
                key, tensor = self.keys.parameter(module, name), place.tensor
                boxes = self.sharded(key, place.shape, tensor) if place.is_parameter else self.whole(key, tensor)
                found += boxes
        for held in self.slots():
            shape = self.shape_of_slot(held, self._tensors[held.module].places[held.name])
            found += self.sharded(held.key, shape, held.tensor)
        return found

    @abc.abstractmethod
    def sharded(self, key: str, shape: tuple[int, ...], tensor: torch.Tensor) -> list[TensorShard]:
        """Copy the boxes of a parameter, or of state laid out like one.

        Args:
            key: Its name.
            shape: The whole tensor's shape.
            tensor: What the device holds; noted for ``push``.
        """

    def shape_of_slot(self, held: HeldSlot, place: Place) -> tuple[int, ...]:
        """Return the whole shape of optimizer state.

        Args:
            held: What the device holds of it.
            place: Where the parameter is.
        """
        del place
        return tuple(held.tensor.shape)

    @abc.abstractmethod
    def whole(self, key: str, tensor: torch.Tensor) -> list[TensorShard]:
        """Copy a tensor of which every process has a copy.

        Args:
            key: Its name.
            tensor: What the device holds; noted for ``push``.
        """

    @abc.abstractmethod
    def push(self) -> None:
        """Copy everything back to the devices, now that it was filled."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Free what was copied."""

    def finish_load(self, optimizers: Sequence[OptimizerRecord]) -> None:
        """Push what was filled, and restore scalars and hyper-parameters."""
        self.push()
        super().finish_load(optimizers)


class FlatState(DeviceState):
    """The state of modules whose parameters are split by elements, or by rows, into one range for each rank.

    Args:
        tensors: Those of modules by the user's names.
        optimizers: Optimizers over their parameters, by the user's names.
        rank: This rank.
        world_size: How many there are.
    """

    def __init__(
        self,
        tensors: Mapping[str, ModuleTensors],
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        rank: int,
        world_size: int,
    ) -> None:
        super().__init__(tensors, optimizers)
        self._rank = rank
        self._ownership = Ownership(rank, world_size)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def sharded(self, key: str, shape: tuple[int, ...], tensor: torch.Tensor) -> list[TensorShard]:
        """Copy this rank's range, without what fills it up so that all ranks' are of one length."""
        host = self._copied(tensor)
        elements = torch.Size(shape).numel()
        start = min(self._rank * tensor.numel(), elements)
        stop = min(start + tensor.numel(), elements)
        return shards_of_range(key, shape, start, host.view(-1)[: stop - start])

    def shape_of_slot(self, held: HeldSlot, place: Place) -> tuple[int, ...]:
        """Return the parameter's shape: where state of another shape than this rank's range belongs is not known.

        Raises:
            CheckpointError: If it has another shape.
        """
        if held.tensor.shape != place.tensor.shape:
            raise CheckpointError(
                f"optimizer state {held.slot!r} of {held.name!r} has shape {tuple(held.tensor.shape)}, this rank's "
                f"range of the parameter {tuple(place.tensor.shape)}; only state of the parameter's own shape can be "
                "saved."
            )
        return place.shape

    def whole(self, key: str, tensor: torch.Tensor) -> list[TensorShard]:
        """Copy a buffer."""
        return [self._ownership.shard(key, self._copied(tensor))]

    def push(self) -> None:
        """Copy everything to the device."""
        import torch_xla

        for tensor, host in self._copies:
            tensor.detach().copy_(host)
        torch_xla.sync()
        self.forget()

    def forget(self) -> None:
        """Free the host's copies."""
        self._copies.clear()

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        host = tensor.detach().cpu().contiguous()
        self._copies.append((tensor, host))
        return host


class SPMDState(DeviceState):
    """The state of modules whose tensors are whole to torch, while the compiler keeps parts of them on many devices.

    Args:
        tensors: Those of modules by the user's names.
        optimizers: Optimizers over their parameters, by the user's names.
        zeros_like: Makes optimizer state spread as a parameter is.
    """

    def __init__(
        self,
        tensors: Mapping[str, ModuleTensors],
        optimizers: Mapping[str, torch.optim.Optimizer],
        zeros_like: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
    ) -> None:
        super().__init__(tensors, optimizers, zeros_like)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._parts: list[tuple[Any, Any]] = []

    def sharded(self, key: str, shape: tuple[int, ...], tensor: torch.Tensor) -> list[TensorShard]:
        """Copy each device's part; nothing is gathered."""
        from torch_xla.distributed.spmd import wrap_if_sharded

        spread = wrap_if_sharded(tensor.detach())
        parts = getattr(spread, "local_shards", None)
        if not parts or any(part.indices is Ellipsis for part in parts):
            return self.whole(key, tensor)
        self._parts.append((spread, parts))
        found = []
        for part in (part for part in parts if part.replica_id == 0):
            view = part.data[tuple(slice(0, index.stop - index.start) for index in part.indices)]
            if view.numel():
                offsets = tuple(index.start for index in part.indices)
                found.append(TensorShard(key=key, shape=shape, offsets=offsets, view=view))
        return found

    def whole(self, key: str, tensor: torch.Tensor) -> list[TensorShard]:
        """Copy a tensor of which every device has a copy."""
        host = tensor.detach().cpu().contiguous()
        self._copies.append((tensor, host))
        return [TensorShard(key=key, shape=tuple(host.shape), offsets=(0,) * host.dim(), view=host)]

    def push(self) -> None:
        """Copy every part back to its device."""
        import torch_xla

        for spread, parts in self._parts:
            spread.load_local_shards_(parts)
        for tensor, host in self._copies:
            tensor.detach().copy_(host)
        torch_xla.sync()
        self.forget()

    def forget(self) -> None:
        """Free the parts and the host's copies."""
        self._parts.clear()
        self._copies.clear()


def flat_part(value: torch.Tensor, shard: torch.Tensor, *, rank: int) -> torch.Tensor:
    """Slice this rank's part out of a whole tensor, laid out like a shard.

    Args:
        value: A whole tensor in host memory.
        shard: This rank's shard of a tensor of that shape.
        rank: This rank.

    Returns:
        A tensor on the shard's device, zeros where the range reaches past the end.
    """
    flat = value.detach().reshape(-1)[rank * shard.numel() : (rank + 1) * shard.numel()]
    part = torch.zeros(shard.shape, dtype=value.dtype)
    part.view(-1)[: flat.numel()] = flat
    return part.to(shard.device)
