"""Collectives over a torch.distributed process group."""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

import torch
import torch.distributed as dist

from shard_core._versions import default_store
from shard_core.collectives.authentication import Authenticator, agree_on_session, read_secret
from shard_core.collectives.device_claims import check_one_rank_per_device
from shard_core.collectives.group_exchange import broadcast_bytes, gather_bytes
from shard_core.collectives.interface import Collectives, check_mean, reduce_op_named
from shard_core.collectives.messages import pack, pack_object, raise_refusal, unpack, unpack_object
from shard_core.collectives.roll_call import RollCall, shared_store
from shard_core.collectives.shutdown import abort_process_groups, close_process_group, settle_at_exit
from shard_core.collectives.store_exchange import StoreExchange
from shard_core.errors import CollectiveError, ShardError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch.autograd.function import FunctionCtx

    from shard_core.coordinator import Coordinator

T = TypeVar("T")

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}

_GLOO_PLACE = re.compile(r"^\[\S*/gloo/\S+\] ")


class ProcessGroupCollectives(Collectives):
    """Runs collectives of torch.distributed: gloo between CPUs, NCCL between CUDA devices.

    Tensors of devices that the backend does not reach travel through host memory.

    Args:
        backend: torch.distributed's backend; None chooses by the device.
        timeout: How long a collective of a training step may take.
        guard_timeout: How long ``connect`` and ``barrier`` wait for a rank before they name it, and how long one
            may give no sign of life on a side channel.
    """

    #: Those of this process that use the group.
    _connected: ClassVar[weakref.WeakSet[ProcessGroupCollectives]] = weakref.WeakSet()

    def __init__(
        self,
        backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        guard_timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        self._backend = backend
        self._timeout = timeout
        self._guard_timeout = guard_timeout
        self._device = torch.device("cpu")
        self._owns_group = False
        self._store: dist.Store | None = None
        self._roll_call: RollCall | None = None
        self._side_store: dist.Store | None = None
        self._side_channels = itertools.count()
        self._authenticator = Authenticator()
        self._messages = itertools.count()

    @classmethod
    def for_run(cls, *, backend: str | None, timeout: timedelta, guard_timeout: timedelta) -> Self:
        """Create them with the backend and the timeouts of a run."""
        return cls(backend, timeout, guard_timeout)

    @property
    def rank(self) -> int:
        """This process's place in the world, from 0."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return dist.get_world_size()

    def connect(self, rank: int, world_size: int, device: torch.device) -> None:
        """Join the ranks, or use the process group that exists."""
        self._device = device
        if dist.is_initialized():
            if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
                raise CollectiveError(
                    f"the process group that exists has this process as rank {dist.get_rank()} of "
                    f"{dist.get_world_size()}, but the environment says rank {rank} of {world_size}."
                )
            settle_at_exit()
            # Each strategy on a group that outlives it calls its own roll.
            name = bytes(broadcast_bytes(secrets.token_bytes(16), 0, self._message_device)).hex()
            self._set_store(dist.PrefixStore(f"shard/{name}", default_store()), rank, world_size)
            self._connected.add(self)
            return
        backend = self._backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        _check_backend(backend)
        store = dist.HashStore() if world_size == 1 else shared_store(rank, world_size, self._guard_timeout)
        self._set_store(store, rank, world_size)
        bound = _bound_device(backend, device)
        if bound is not None and world_size > 1:
            assert self._roll_call is not None
            check_one_rank_per_device(dist.PrefixStore("devices", store), rank, bound, self._roll_call)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=self._timeout,
            device_id=bound,
        )
        self._owns_group = True
        self._connected.add(self)
        settle_at_exit()

    def _set_store(self, store: dist.Store, rank: int, world_size: int) -> None:
        secret = read_secret()
        self._store, self._side_channels, self._messages = store, itertools.count(), itertools.count()
        self._roll_call = RollCall(store, rank, world_size, self._guard_timeout)
        meeting = dist.PrefixStore("meeting", store)
        self._authenticator = agree_on_session(meeting, rank, world_size, secret, self._roll_call)

    def all_reduce(self, tensor: torch.Tensor, group: Any = None, reduce_op: str = "mean") -> torch.Tensor:
        """Reduce over ranks into a new tensor; gloo and NCCL alike, the mean is a sum divided."""
        op = reduce_op_named(reduce_op)
        check_mean(op, tensor)
        if dist.get_world_size(group) == 1:
            return tensor.detach().clone()
        there = carrying_device(tensor.device, group, self._device)
        # Sent row by row: the strides may differ between ranks.
        result = tensor.detach().to(there, copy=True, memory_format=torch.contiguous_format)
        with translate_torch_errors("a reduction"):
            dist.all_reduce(result, op=_OPS.get(op, dist.ReduceOp.SUM), group=group)
        if op == "mean":
            result.div_(dist.get_world_size(group))
        return result.to(tensor.device) if tensor.is_contiguous() else torch.empty_like(tensor).copy_(result)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Collect a tensor of the same shape from every rank."""
        if sync_grads:
            return cast("torch.Tensor", _AllGather.apply(tensor, group, self._device))  # type: ignore[no-untyped-call]
        with translate_torch_errors("a gather"):
            return _gather(tensor, group, self._device)

    def broadcast_object(self, value: T, src: int = 0) -> T:
        """Return rank ``src``'s ``value`` on every rank; nothing is pickled."""
        return self._broadcast(value, src, pack, unpack)

    def broadcast_any(self, value: T, src: int = 0) -> T:
        """Return rank ``src``'s ``value`` on every rank; pickled if it consists of other than plain values."""
        if self._roll_call is None:
            raise _not_connected()  # nothing would be signed
        return self._broadcast(value, src, pack_object, unpack_object)

    def _broadcast(
        self, value: T, src: int, pack: Callable[[T], bytes], unpack: Callable[[memoryview, torch.device], T]
    ) -> T:
        if not 0 <= src < self.world_size:
            raise CollectiveError(f"there is no rank {src} to broadcast from; ranks are 0 to {self.world_size - 1}.")
        context = f"broadcast {next(self._messages)} of rank {src}"
        message = pack(value) if self.rank == src else b""
        signed = self._authenticator.sign(message, context) if self.rank == src else b""
        with translate_torch_errors("a broadcast"):
            arrived = broadcast_bytes(signed, src, self._message_device)
        if self.rank == src:
            raise_refusal(message)
            return value
        return unpack(self._authenticator.verify(arrived, context), self._device)

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's ``value`` on every rank, in rank order; nothing is pickled."""
        context = f"exchange {next(self._messages)} of rank"
        sent = self._authenticator.sign(pack(value), f"{context} {self.rank}")
        with translate_torch_errors("an exchange"):
            arrived = gather_bytes(sent, self._message_device)
        messages = [self._authenticator.verify(each, f"{context} {rank}") for rank, each in enumerate(arrived)]
        return [unpack(message, self._device) for message in messages]

    @property
    def _message_device(self) -> torch.device:
        return carrying_device(torch.device("cpu"), None, self._device)

    def barrier(self, name: str = "barrier") -> None:
        """Wait for every rank; one that does not come is named."""
        if self._roll_call is None:
            raise _not_connected()
        self._roll_call.answer(name)

    def any_true(self, flag: bool) -> bool:
        """Return on every rank whether ``flag`` is true on any."""
        if self.world_size == 1:
            return flag
        return bool(self.all_reduce(torch.tensor(int(flag)), reduce_op="max").item())

    def side_channel(self) -> AbstractContextManager[Coordinator]:
        """Open one over the store the ranks met at, by another connection: one client serves one thread at a time."""
        if self._store is None:
            raise _not_connected()
        self._side_store = self._side_store or self._store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        name = f"side_channel/{next(self._side_channels)}"
        channel = dist.PrefixStore(name, self._side_store)
        return StoreExchange(
            channel, self.rank, self.world_size, self._guard_timeout, authenticator=self._authenticator, name=name
        )

    def close(self) -> None:
        """Leave the process group; if ``connect`` of any of them made it, the last to leave destroys it."""
        self._leave(close_process_group)

    def abort(self) -> None:
        """Leave the process group; over NCCL the last to leave aborts it, since destroying waits for all ranks."""
        over_nccl = self._owns_group and self.world_size > 1 and "nccl" in dist.get_backend_config()
        self._leave(abort_process_groups if over_nccl else close_process_group)

    def _leave(self, end_group: Callable[[], None]) -> None:
        self._store = self._roll_call = self._side_store = None
        self._connected.discard(self)
        if self._owns_group:
            self._owns_group = False
            heir = next(iter(self._connected), None)
            if heir is None:
                end_group()
            else:
                heir._owns_group = True


def _not_connected() -> CollectiveError:
    return CollectiveError("these collectives are not connected; call setup_environment() first.")


def _bound_device(backend: str, device: torch.device) -> torch.device | None:
    """Return the device for NCCL to bind the group to; None where another backend carries its tensors.

    A bound group connects when it is made, by the device of this rank, whatever is current later; groups along a mesh
    split off it instead of meeting anew.
    """
    by_device = dist.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    return device if device.type == "cuda" and by_device.get("cuda") == "nccl" else None


def _check_backend(backend: str) -> None:
    """Refuse a backend this torch was built without; ``"cpu:gloo,cuda:nccl"`` names one per device."""
    for part in backend.split(","):
        name = part.rpartition(":")[2]
        if not dist.is_backend_available(name):
            there = [known for known in ("gloo", "nccl", "mpi", "xccl") if dist.is_backend_available(known)]
            hint = nearest(name, there) or ";"
            raise CollectiveError(f"torch has no process group backend {name!r} here{hint} it has: {', '.join(there)}.")


@contextlib.contextmanager
def translate_torch_errors(what: str, *, among_others: bool = False) -> Iterator[None]:
    """Translate what torch raises inside where a message between ranks fails.

    Args:
        what: The kind of message, such as "a reduction".
        among_others: Whether other work may fail inside, too, whose errors are raised as they are; without, nothing
            but messages can.

    Raises:
        CollectiveError: If a message failed.
    """
    try:
        yield
    except ShardError:
        raise
    except RuntimeError as error:
        if among_others and not (isinstance(error, dist.DistError) or "/gloo/" in str(error)):
            raise
        # What gloo begins with, the place in its sources, and its advice tell a user nothing.
        reason = _GLOO_PLACE.sub("", str(error).split("\n", 1)[0]).split(". This is typically", 1)[0].rstrip(".")
        raise CollectiveError(
            f"rank {dist.get_rank()} waited in {what} in vain: {reason}; a rank that has died or left shows why in its "
            "own output, and one that is late must come within the strategy's `timeout`."
        ) from error


def carrying_device(device: torch.device, group: Any, own: torch.device) -> torch.device:
    """Return where a tensor must be for a process group to carry it.

    NCCL carries nothing from host memory, where counts and flags live; gloo and MPI nothing from an XLA device.

    Args:
        device: Where the tensor is; it stays there if it can.
        group: The process group; None for the whole world.
        own: This rank's device, which is taken if host memory does not do either.

    Raises:
        CollectiveError: If the group carries from none of these.
    """
    carried = [entry.partition(":")[0] for entry in dist.get_backend_config(group).split(",")]
    for there in (device, torch.device("cpu"), own):
        if there.type in carried:
            return there
    raise CollectiveError(
        f"the process group carries tensors of {' and '.join(carried)} devices only, and this rank's is {own}; give "
        "process_group_backend one for it, such as 'cpu:gloo,cuda:nccl'."
    )


def _gather(tensor: torch.Tensor, group: Any, own: torch.device) -> torch.Tensor:
    here = tensor.detach().to(carrying_device(tensor.device, group, own)).contiguous()
    result = here.new_empty((dist.get_world_size(group), *here.shape))
    dist.all_gather(list(result.unbind(0)), here, group=group)
    return result.to(tensor.device)


class _AllGather(torch.autograd.Function):
    """Gathers forward; backward, each rank's part gets the sum of what all ranks made of it."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: torch.Tensor, group: Any, own: torch.device) -> torch.Tensor:
        ctx.group, ctx.own = group, own  # type: ignore[attr-defined]
        return _gather(tensor, group, own)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        group, own = ctx.group, ctx.own  # type: ignore[attr-defined]
        there = carrying_device(gradients[0].device, group, own)
        total = gradients[0].to(there, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total[dist.get_rank(group)].to(gradients[0].device), None, None
