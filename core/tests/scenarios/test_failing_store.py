"""A store that fails at any one request, or for good from some request on, keeps the old checkpoint or the new one."""

from __future__ import annotations

import contextlib

import pytest
import torch
from fixtures.failing_store import FailingStore
from fixtures.single_rank import load
from fixtures.thread_ranks import on_ranks
from torch import nn

from shard_core.checkpoint.format.folder import latest
from shard_core.checkpoint.inspection.verify import verify
from shard_core.checkpoint.retention.policy import Retention
from shard_core.checkpoint.retention.removal import remove_leftovers
from shard_core.checkpoint.retention.run_folder import run_entry
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.checkpoint.storage.opening import open_folder
from shard_core.errors import CheckpointError

pytestmark = pytest.mark.slow

RUN = "failing://run"


def _module(value):
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def _save(name, value, form=None, retention=None):
    """Save on two ranks; return whether it succeeded, which is the same on both."""

    def save_on(coordinator):
        state = TensorState({"model": _module(value)}, {}, rank=coordinator.rank, world_size=2)
        ShardedCheckpointIO(retention=retention).save(
            f"{RUN}/{name}",
            state,
            {"value": value, "copy": torch.tensor(value)},
            coordinator=coordinator,
            information={},
            state_dict_type=form,
        )

    answers = on_ranks(2, save_on)
    succeeded = {answer is None for answer in answers}
    assert len(succeeded) == 1
    assert all(answer is None or isinstance(answer, CheckpointError) for answer in answers), answers
    return succeeded.pop()


def _value(name):
    module = _module(-1)
    values = load(f"{RUN}/{name}", module).values
    assert all((parameter == values["value"]).all() for parameter in module.parameters())
    assert verify(f"{RUN}/{name}").is_fine
    return values["value"]


def _objects(name):
    return {key for key in FailingStore.store if key.startswith(f"/run/{name}/")}


@pytest.fixture(autouse=True)
def _empty():
    FailingStore.fail_at(-1, "before")
    FailingStore.store.clear()


@pytest.mark.parametrize(
    ("mode", "form"), [("before", "sharded"), ("after", "sharded"), ("gone", "sharded"), ("before", "full")]
)
def test_a_save_that_replaces_another_fails_at_any_request(mode, form):
    outcomes, request, triggered = [], 0, True
    while triggered:
        FailingStore.store.clear()
        assert _save("step-1", 0.0)
        before = _objects("step-1")
        FailingStore.fail_at(request, mode)
        saved = _save("step-1", 1.0, form)
        triggered = FailingStore.failed is not None
        failed = FailingStore.failed
        FailingStore.fail_at(-1, mode)
        outcomes.append(saved)
        assert latest(RUN) == f"{RUN}/step-1"
        assert _value("step-1") == (1.0 if saved else 0.0), (request, failed)
        if not saved and mode != "gone" and failed != ("put", "/run/step-1/manifest.json"):
            assert _objects("step-1") == before, failed
        assert _save("step-1", 2.0)
        assert _value("step-1") == 2.0
        entry = run_entry(open_folder(f"{RUN}/step-1"))
        assert saved or mode == "gone" or failed == ("put", "/run/step-1/manifest.json") or not entry.leftovers, failed
        remove_leftovers(entry)
        assert len(_objects("step-1")) == 5
        request += 1
    assert len(outcomes) > 20
    assert not all(outcomes)


def test_a_first_save_fails_at_any_request_and_leaves_nothing():
    request, triggered = 0, True
    while triggered:
        FailingStore.store.clear()
        FailingStore.fail_at(request, "before")
        saved = _save("step-1", 1.0)
        failed, triggered = FailingStore.failed, FailingStore.failed is not None
        FailingStore.fail_at(-1, "before")
        assert (latest(RUN) is not None) == saved
        if not saved and failed != ("put", "/run/step-1/manifest.json"):
            assert not FailingStore.store, failed
        request += 1
    assert request > 20


@pytest.mark.filterwarnings("ignore:an old checkpoint stays", "ignore:no old checkpoint was removed")
@pytest.mark.parametrize("mode", ["before", pytest.param("gone", marks=pytest.mark.long)])
def test_what_goes_wrong_while_old_checkpoints_are_removed_does_not_fail_the_save(mode):
    request, triggered = 0, True
    while triggered:
        FailingStore.store.clear()
        for step in (1, 2):
            assert _save(f"step-{step}", float(step))
        FailingStore.fail_at(request, mode)
        saved = _save("step-3", 3.0, retention=Retention(keep_last=2))
        triggered = FailingStore.failed is not None
        FailingStore.fail_at(-1, mode)
        assert latest(RUN) == f"{RUN}/step-{3 if saved else 2}"
        assert _value("step-2") == 2.0
        if saved:
            assert _value("step-3") == 3.0
        request += 1
    assert not _objects("step-1")


def test_a_load_that_fails_at_any_request_changes_nothing():
    assert _save("step-1", 1.0)
    request, triggered = 0, True
    while triggered:
        FailingStore.fail_at(request, "before")
        module = _module(-1)
        with contextlib.suppress(CheckpointError):
            load(f"{RUN}/step-1", module)
        triggered = FailingStore.failed is not None
        wanted = -1 if triggered else 1
        assert all((parameter == wanted).all() for parameter in module.parameters())
        request += 1
    assert request > 5
