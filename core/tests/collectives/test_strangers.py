"""Who reaches the port of the ranks' store, or sends among them, runs no code in them and is believed nothing."""

from __future__ import annotations

import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strangers import save_beside_a_stranger

from shard_core import get_strategy
from shard_core.collectives.authentication import Authenticator, agree_on_session
from shard_core.collectives.group_exchange import broadcast_bytes, gather_bytes
from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.collectives.roll_call import RollCall
from shard_core.collectives.serialization import serialize
from shard_core.collectives.store_exchange import StoreExchange
from shard_core.coordinator import SECRET_VARIABLE
from shard_core.errors import CollectiveError

SECRET = b"a secret of sixteen or more"


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.mark.long
def test_a_pickle_in_the_store_of_a_launched_run_is_refused_unread(tmp_path: Path) -> None:
    strategy = get_strategy("ddp", accelerator="cpu", devices=2, guard_timeout=timedelta(seconds=20))
    strategy.launch(save_beside_a_stranger, tmp_path)
    assert not (tmp_path / "ran").exists()
    said = (tmp_path / "rank-1").read_text()
    # Rank 0's own answer may take the place of the first before rank 1 looks; the next waits for what rank 1 says.
    assert re.search(
        r"a message \(side_channel/\d/\d+/all\) was refused unread: no rank of this run has signed it", said
    ), said
    assert not (tmp_path / "c" / "manifest.json").exists()


def planted(message: bytes, authenticator: Authenticator) -> str:
    """Write a message to where rank 0 of two answers, and return what rank 1 raises, which is there before rank 0."""
    store = dist.HashStore()
    store.set("1/all", message)
    with pytest.raises(CollectiveError) as error:  # noqa: SIM117
        with StoreExchange(store, 1, 2, timedelta(seconds=1), authenticator=authenticator) as line:
            line.gather_objects(1)
    return str(error.value)


def test_a_pickle_is_no_message_without_a_secret_either(tmp_path: Path) -> None:
    for message in (pickle.dumps(Touches(tmp_path / "ran")), b"\0" + pickle.dumps(Touches(tmp_path / "ran"))):
        said = planted(message, Authenticator())
        assert "is signed, but this rank has no secret" in said or "none that ranks send" in said
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("secret", [None, b"another secret altogether"])
def test_what_no_rank_has_signed_is_refused(secret: bytes | None) -> None:
    message = Authenticator(secret).sign(serialize(("gathered", [b"v", b"v"])), "exchange/1/all")
    assert "was refused unread" in planted(message, Authenticator(SECRET))


def test_a_message_counts_at_its_own_place_alone() -> None:
    ranks = Authenticator(SECRET, b"session")
    signed = ranks.sign(b"go on", "side_channel/0/1/all")
    assert bytes(ranks.verify(signed, "side_channel/0/1/all")) == b"go on"
    for elsewhere in ("side_channel/0/2/all", "side_channel/1/1/all", "side_channel/0/1/0"):
        with pytest.raises(CollectiveError, match="was refused unread"):
            ranks.verify(signed, elsewhere)
    with pytest.raises(CollectiveError, match="was refused unread"):
        Authenticator(SECRET, b"the next session").verify(signed, "side_channel/0/1/all")
    for place in range(len(signed)):
        changed = signed[:place] + bytes([signed[place] ^ 1]) + signed[place + 1 :]
        with pytest.raises(CollectiveError, match="was refused unread"):
            ranks.verify(changed, "side_channel/0/1/all")


def met(*given: bytes | None) -> list[str]:
    """Run a meeting of ranks under their secrets, and return what each raises, or the session."""
    store = dist.HashStore()

    def meets(rank: int) -> str:
        roll_call = RollCall(dist.PrefixStore("roll", store), rank, len(given), timedelta(seconds=20))
        try:
            return agree_on_session(store, rank, len(given), given[rank], roll_call)._session.hex()
        except CollectiveError as error:
            return str(error)

    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(meets, range(len(given))))


def test_ranks_agree_on_a_session_that_is_new_each_time() -> None:
    for secret in (None, SECRET):
        first, second = (set(met(secret, secret, secret)) for _ in range(2))
        assert len(first) == len(second) == 1
        assert first != second
        assert all(len(bytes.fromhex(each)) == 32 for each in first | second)


@pytest.mark.parametrize(("address", "level"), [("127.0.0.1", "INFO"), ("10.0.0.1", "WARNING")])
def test_that_nothing_is_signed_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, address: str, level: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    with caplog.at_level("INFO"):
        met(SECRET, SECRET)
        assert not caplog.records
        met(None, None)
    (record,) = caplog.records
    assert record.levelname == level
    assert record.getMessage().startswith("messages between ranks are not signed; set SHARD_SECRET")


@pytest.mark.parametrize(
    "given", [(SECRET, SECRET, b"another secret of some"), (SECRET, SECRET, None), (None, None, SECRET)]
)
def test_ranks_with_different_secrets_are_named(given: tuple[bytes | None, ...]) -> None:
    said = met(*given)
    assert said[0] == said[1]
    assert "SHARD_SECRET is not on rank 2 what it is on rank 0; give every rank the same" in said[0]
    assert "give every rank the same SHARD_SECRET, or none any" in said[2]


def send_among_ranks(how: str, file: Path) -> tuple[str, list[Any]]:
    """Send over the process group what no rank sends there; return the error, and what is gathered before."""
    os.environ[SECRET_VARIABLE] = SECRET.decode()
    collectives = ProcessGroupCollectives()
    collectives.connect(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    before = collectives.gather_objects(collectives.rank)
    pickled = b"p" + pickle.dumps(Touches(file))
    own = collectives._authenticator
    call = "broadcast 1 of rank 1"
    messages = {
        "unsigned": b"\0" + pickled,
        "another secret": Authenticator(b"another secret altogether", own._session).sign(pickled, call),
        "another session": Authenticator(SECRET).sign(pickled, call),
        "another place": own.sign(pickled, "broadcast 0 of rank 1"),
    }
    try:
        if collectives.rank == 1:
            broadcast_bytes(messages[how], 1, torch.device("cpu"))
            return "", before
        return str(collectives.broadcast_any(None, src=1)), before
    except CollectiveError as error:
        return str(error), before


@pytest.mark.parametrize("how", ["unsigned", "another secret", "another session", "another place"])
def test_a_pickle_that_no_rank_has_signed_is_not_unpickled(worlds: Any, tmp_path: Path, how: str) -> None:
    (said, before), (_, same) = worlds(2).run(send_among_ranks, how, tmp_path / "ran")
    assert "a message (broadcast 1 of rank 1) was refused unread" in said
    assert before == same == [0, 1]
    assert not (tmp_path / "ran").exists()


def pickle_among_values(file: Path) -> str:
    """Send a pickle, unsigned, where ranks exchange values of Shard's own."""
    collectives = ProcessGroupCollectives()
    collectives.connect(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    try:
        if collectives.rank == 1:
            gather_bytes(b"\0p" + pickle.dumps(Touches(file)), torch.device("cpu"))
            return ""
        return str(collectives.gather_objects(None))
    except CollectiveError as error:
        return str(error)


def test_what_shard_sends_is_not_unpickled_even_without_a_secret(worlds: Any, tmp_path: Path) -> None:
    said, _ = worlds(2).run(pickle_among_values, tmp_path / "ran")
    assert said == "a message holds something else than the values that ranks send; it was not read."
    assert not (tmp_path / "ran").exists()


def test_a_secret_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(CollectiveError, match="SHARD_SECRET has 5 characters, too few for a secret"):
        get_strategy("ddp", accelerator="cpu", devices=1).setup_environment()


@pytest.mark.parametrize("key", ["roll-call/1/name", "roll-call/1/complete", "roll-call/at/1"])
def test_what_a_stranger_puts_into_a_roll_call_ends_in_a_sentence(key: str) -> None:
    store = dist.HashStore()
    store.set(key, b"\xff no number, no text")  # type: ignore[arg-type]  # torch's stubs leave bytes out
    with pytest.raises(CollectiveError):
        RollCall(store, 0, 2, timedelta(seconds=0.1)).answer("barrier")
