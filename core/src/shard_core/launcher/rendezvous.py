"""The rendezvous of one host's ranks: torch's agent serves their store, where no other host can connect."""

from __future__ import annotations

import socket

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

_NAME = "shard-loopback"
_ADDRESS = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """The static rendezvous of one agent, with a store that listens on the loopback interface alone.

    torch's own handlers listen on every interface, and its dynamic one unpickles what it finds in its store.

    Args:
        run_id: The run.
        port: Where to listen; 0 for any port that is free.

    Raises:
        OSError: If the port is taken.
    """

    def __init__(self, run_id: str, port: int) -> None:
        self._run_id = run_id
        listener = socket.create_server((_ADDRESS, port), backlog=socket.SOMAXCONN)
        self._port: int = listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            _ADDRESS,
            self._port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        """Return the name it is registered under."""
        return _NAME

    @property
    def use_agent_store(self) -> bool:
        """Return True: ranks meet at the agent's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the one place there is; a restart finds it as it was."""
        assert self._store is not None
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(_ADDRESS, self._port))

    def is_closed(self) -> bool:
        """Return False: nobody else could close it."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other agent can come."""
        return 0

    def get_run_id(self) -> str:
        """Return the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Stop listening."""
        self._store = None
        return True


def _create(parameters: RendezvousParameters) -> LoopbackRendezvous:
    return LoopbackRendezvous(parameters.run_id, int(parameters.endpoint.rpartition(":")[2]))


def loopback_rendezvous() -> str:
    """Return the name of the rendezvous backend, known to torch from now on.

    Its endpoint is ``localhost:port``; port 0 takes any that is free, and nobody else can take it in between.
    """
    rendezvous_handler_registry.register(_NAME, _create)
    return _NAME
