"""What a user saves comes back in place; what does not fit is said."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.checkpoint.interface import CheckpointIO, LoadedCheckpoint, SaveHandle
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.errors import (
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    InvalidOption,
    MissingCapability,
    SetupError,
    ShardError,
)
from shard_core.testing.processes.world import World


def ready(seed: int, **options: Any) -> Any:
    strategy = get_strategy("single", **options)
    torch.manual_seed(seed)
    module = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1 * (seed + 1), momentum=0.9)
    module, (optimizer,) = strategy.setup_module_and_optimizers(module, [optimizer])
    strategy.backward(module(torch.ones(1, 3)).sum(), module)
    strategy.optimizer_step(optimizer)
    return strategy, {"model": module, "optimizer": optimizer}


def test_everything_comes_back_in_place(tmp_path: Path) -> None:
    strategy, state = ready(0)
    scheduler = torch.optim.lr_scheduler.StepLR(state["optimizer"], 2)
    strategy.save_checkpoint(tmp_path / "c", {**state, "scheduler": scheduler, "step": 7, "notes": {"a": [1, None]}})
    again, other = ready(1)
    other_scheduler = torch.optim.lr_scheduler.StepLR(other["optimizer"], 5)
    mine = {**other, "scheduler": other_scheduler, "step": 0}
    assert again.load_checkpoint(tmp_path / "c", mine) == {"notes": {"a": [1, None]}}
    assert mine["step"] == 7
    assert other_scheduler.step_size == 2
    assert other["optimizer"].param_groups[0]["lr"] == 0.1
    assert torch.equal(other["model"].weight, state["model"].weight)
    weight, theirs = other["model"].weight, state["model"].weight
    momentum = state["optimizer"].state[theirs]["momentum_buffer"]
    assert torch.equal(other["optimizer"].state[weight]["momentum_buffer"], momentum)


def test_what_was_not_asked_for_is_returned(tmp_path: Path) -> None:
    strategy, state = ready(0)
    strategy.save_checkpoint(tmp_path / "c", {**state, "step": 7})
    again, other = ready(1)
    assert again.load_checkpoint(tmp_path / "c", {"model": other["model"]}) == {"optimizer": None, "step": 7}
    assert again.load_checkpoint(tmp_path / "c") == {"model": None, "optimizer": None, "step": 7}
    with pytest.raises(CheckpointError, match="optimizer"):
        again.load_checkpoint(tmp_path / "c", {"optimizer": other["optimizer"]})


def test_keys_of_the_strategys_own_are_refused(tmp_path: Path) -> None:
    strategy, state = ready(0)
    with pytest.raises(CheckpointError, match="keys that begin with 'shard_' are the strategy's own"):
        strategy.save_checkpoint(tmp_path / "c", {**state, "shard_random": 1})


def test_what_the_checkpoint_lacks_is_an_error_or_a_warning(tmp_path: Path) -> None:
    strategy, state = ready(0)
    strategy.save_checkpoint(tmp_path / "c", {"model": state["model"]})
    mine = {"model": state["model"], "epoch": 3}
    with pytest.raises(CheckpointMismatch, match="the value 'epoch' is not in the checkpoint; it holds: none"):
        strategy.load_checkpoint(tmp_path / "c", mine)
    with pytest.warns(UserWarning, match="left as they were: the value 'epoch'"):
        strategy.load_checkpoint(tmp_path / "c", mine, strict=False)
    assert mine["epoch"] == 3
    bigger = get_strategy("single")
    module = bigger.setup_module(nn.Linear(4, 2))
    with pytest.warns(UserWarning, match=r"left as they were: .*model\.weight"):
        bigger.load_checkpoint(tmp_path / "c", {"model": module}, strict=False)
    with pytest.raises(CheckpointNotFound, match="none"):
        strategy.load_checkpoint(tmp_path / "none", mine)


class Counter:
    """A stateful object that takes back no more than a limit."""

    def __init__(self, count: int, limit: int = 100) -> None:
        self.counts = [count]
        self.limit = limit

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts[:] = state["counts"]
        if self.counts[0] > self.limit:
            raise ValueError("the count is too large")


def test_a_stateful_object_that_refuses_leaves_all_as_they_were(tmp_path: Path) -> None:
    strategy, state = ready(0)
    strategy.save_checkpoint(tmp_path, {**state, "a": Counter(7), "b": Counter(70)})
    strategy, state = ready(1)
    before = {name: tensor.clone() for name, tensor in strategy.module_state_dict(state["model"]).items()}
    first, second = Counter(1), Counter(2, limit=50)
    with pytest.raises(CheckpointError, match="the count is too large"):
        strategy.load_checkpoint(tmp_path, {**state, "a": first, "b": second})
    assert (first.counts, second.counts) == ([1], [2])
    after = strategy.module_state_dict(state["model"])
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_the_scaler_goes_along_and_may_be_missing(tmp_path: Path) -> None:
    strategy, state = ready(0, precision="16-mixed")
    strategy.precision.scaler.record(finite=False)
    strategy.save_checkpoint(tmp_path / "half", state)
    again, other = ready(1, precision="16-mixed")
    again.load_checkpoint(tmp_path / "half", other)
    assert again.precision.scaler.begin_backward() == 32768.0
    plain, full = ready(2)
    assert plain.load_checkpoint(tmp_path / "half", full).keys() == {"shard_precision"}
    plain.save_checkpoint(tmp_path / "full", full)
    again.load_checkpoint(tmp_path / "full", other)


def test_state_dicts_have_the_users_names() -> None:
    strategy, state = ready(0)
    whole = strategy.module_state_dict(state["model"])
    assert list(whole) == ["weight", "bias"]
    assert torch.equal(whole["weight"], state["model"].weight)
    described = strategy.optimizer_state_dict(state["optimizer"])
    assert described["param_groups"][0]["params"] == ["weight", "bias"]
    assert described["state"]["bias"]["momentum_buffer"].shape == (2,)
    assert [name for name, _ in strategy.full_parameters(state["model"])] == ["weight", "bias"]


def test_weights_of_others_fill_the_module_and_nothing_else(tmp_path: Path) -> None:
    strategy, state = ready(0)
    weight = state["model"].weight
    momentum = state["optimizer"].state[weight]["momentum_buffer"].clone()
    torch.save(
        {"net": {"weight": torch.full((2, 3), 5.0), "bias": torch.ones(2), "gain": torch.ones(2)}}, tmp_path / "w"
    )
    with pytest.raises(CheckpointMismatch, match="'gain' is in the files, but not here"):
        strategy.load_weights(tmp_path / "w", state["model"], key="net")
    with pytest.warns(UserWarning, match="left as they were: 'gain' is in the files"):
        left = strategy.load_weights(tmp_path / "w", state["model"], key="net", strict=False)
    assert left == ("'gain' is in the files, but not here",)
    assert strategy.load_weights(tmp_path / "w", state["model"], key="net", names={"gain": None}) == ()
    assert state["model"].weight is weight
    assert (weight == 5).all()
    assert torch.equal(state["optimizer"].state[weight]["momentum_buffer"], momentum)
    with pytest.raises(SetupError, match="was not set up by this strategy"):
        strategy.load_weights(tmp_path / "w", nn.Linear(3, 2))


def test_the_newest_of_a_run_is_found(tmp_path: Path) -> None:
    strategy, state = ready(0)
    assert strategy.latest_checkpoint(tmp_path / "run") is None
    for step in (3, 2, 1):
        strategy.save_checkpoint(tmp_path / "run" / str(step), {**state, "step": step})
    (tmp_path / "run" / "died").mkdir()
    (tmp_path / "run" / "died" / "model-00000-of-00001.safetensors").write_bytes(b"cut short")
    assert strategy.latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "1"


class Elsewhere(CheckpointIO):
    """Storage of somebody who does not say what is the newest."""

    def save(self, path: Any, state: Any, values: Any, **options: Any) -> SaveHandle:
        """Save nothing."""
        return SaveHandle.finished(path)

    def load(self, path: Any, state: Any, **options: Any) -> LoadedCheckpoint:
        """Load nothing."""
        return LoadedCheckpoint(values={}, information={})


def test_storage_that_cannot_tell_the_newest_says_so() -> None:
    strategy = get_strategy("single", checkpoint_io=Elsewhere())
    with pytest.raises(MissingCapability, match="Elsewhere cannot tell which checkpoint in 'run' is the newest"):
        strategy.latest_checkpoint("run")


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda strategy, path, _: strategy.save_checkpoint("", {}), "the path is empty"),
        (lambda strategy, path, _: strategy.latest_checkpoint(""), "the path is empty"),
        (lambda strategy, path, model: strategy.load_weights("", model), "the path is empty"),
        (lambda strategy, path, _: strategy.save_checkpoint(path / "file" / "c", {}), "a part of it is a file"),
        (lambda strategy, path, _: strategy.latest_checkpoint(path / "file"), "is a file; a run keeps"),
        (lambda strategy, path, model: strategy.load_weights("/dev/null", model), "holds no weights that can be read"),
        (lambda strategy, path, _: strategy.save_checkpoint(path / "c", {}, filter=3), "filter is 3, of type int"),
        (lambda strategy, path, _: strategy.save_checkpoint(path / "c", {}, blocking="no"), "blocking is 'no'"),
        (
            lambda strategy, path, _: strategy.save_checkpoint(path / "c", {}, storage_options=[]),
            "storage_options is []",
        ),
        (lambda strategy, path, _: strategy.load_checkpoint(path / "c", {}, strict="no"), "strict is 'no'"),
        (lambda strategy, path, model: strategy.load_weights(path / "w", model, names=3), "names is 3, of type int"),
        (lambda strategy, path, model: strategy.load_weights(path / "w", model, key=3), "key is 3, of type int"),
        (lambda strategy, path, model: strategy.load_weights(path / "w", model, cast="no"), "cast is 'no'"),
        (
            lambda strategy, path, _: strategy.save_checkpoint(path / "c", {"a": {"b": torch.empty(2, device="meta")}}),
            "'a.b' is on the meta device",
        ),
        (
            lambda strategy, path, _: strategy.save_checkpoint(path / "c", {"a": torch.eye(2).to_sparse()}),
            "'a' has layout torch.sparse_coo",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(tmp_path: Path, call: Any, part: str) -> None:
    (tmp_path / "file").touch()
    strategy, state = ready(0)
    with pytest.raises(ShardError) as caught:
        call(strategy, tmp_path, state["model"])
    assert part in str(caught.value)
    assert "failed" not in str(caught.value)


def test_differences_are_told_in_the_users_own_names(tmp_path: Path) -> None:
    strategy, state = ready(0)
    strategy.save_checkpoint(tmp_path / "c", {"net": state["model"], "optimizer": state["optimizer"]})
    other = get_strategy("single")
    with pytest.raises(
        CheckpointMismatch, match=r"- 'net\.weight' has shape \(2, 4\) here, \(2, 3\) in the checkpoint"
    ):
        other.load_checkpoint(tmp_path / "c", {"net": other.setup_module(nn.Linear(4, 2))})


@pytest.mark.parametrize("path", [None, 3, b"run/step-1"])
def test_a_path_that_is_none_is_refused_in_a_sentence(path: Any) -> None:
    strategy, state = ready(0)
    for call in (
        lambda: strategy.save_checkpoint(path, state),
        lambda: strategy.load_checkpoint(path, state),
        lambda: strategy.load_weights(path, state["model"]),
        lambda: strategy.latest_checkpoint(path),
    ):
        with pytest.raises(
            InvalidOption, match=r"the path is of type .*; it must be a string or a pathlib\.Path, and comes first"
        ):
            call()


@pytest.mark.parametrize("state", [3, [("step", 1)], "step"])
def test_a_state_that_is_no_dict_is_refused_in_a_sentence(tmp_path: Path, state: Any) -> None:
    with get_strategy("single") as strategy:
        strategy.save_checkpoint(tmp_path / "c", {"step": 1})
        for call in (strategy.save_checkpoint, strategy.load_checkpoint):
            with pytest.raises(InvalidOption, match=r"state is of type .*; it must be a dict, by keys of your choice"):
                call(tmp_path / "c", state)


def test_a_form_that_is_none_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with get_strategy("single") as strategy, pytest.raises(InvalidOption, match="it must be one of: sharded, full"):
        strategy.save_checkpoint(tmp_path / "c", {"step": 1}, state_dict_type=3)  # type: ignore[arg-type]


class Speechless:
    """Something stateful that cannot return its state on rank 1."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def state_dict(self) -> dict[str, Any]:
        if self._rank == 1:
            raise OSError("nothing to say")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Failing(Elsewhere):
    """Storage of somebody that fails on rank 1."""

    def save(self, path: Any, state: Any, values: Any, *, coordinator: Any, **options: Any) -> SaveHandle:
        """Fail there."""
        if coordinator.rank == 1:
            raise OSError("no room")
        return SaveHandle.finished(path)

    def load(self, path: Any, state: Any, *, coordinator: Any, **options: Any) -> LoadedCheckpoint:
        """Fail there."""
        if coordinator.rank == 1:
            raise KeyError("lost")
        return LoadedCheckpoint(values={}, information={})


def test_a_save_that_a_state_breaks_off_leaves_nothing_behind(tmp_path: Path) -> None:
    strategy, state = ready(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorState, "exchange", lambda *_: {}["lost"])
        with pytest.raises(KeyError, match="lost"):
            strategy.save_checkpoint(tmp_path / "c", state)
    assert list(tmp_path.iterdir()) == []
    strategy.save_checkpoint(tmp_path / "c", state)


def fails_on_one_rank(folder: Path) -> list[str]:
    """Save and load with storage that fails on rank 1, and with a filter that differs there."""
    said = []
    with get_strategy("ddp", checkpoint_io=Failing()) as failing, get_strategy("ddp") as strategy:
        model = strategy.setup_module(nn.Linear(3, 2))
        for call in (
            lambda: failing.save_checkpoint(folder / "c", {"step": 1}),
            lambda: failing.load_checkpoint(folder / "c"),
            lambda: strategy.save_checkpoint(folder / "c", {"net": model}, filter=lambda _: strategy.global_rank == 1),
        ):
            try:
                call()
            except ShardError as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def test_storage_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    with World(2) as world:
        answers = world.run(fails_on_one_rank, tmp_path, timeout=20)
    for saving, loading, filtering in answers:
        assert saving.endswith("failed on 1 of 2 ranks: rank 1: OSError: no room")
        assert loading.endswith("failed on 1 of 2 ranks: rank 1: KeyError: 'lost'")
        assert filtering.startswith("CheckpointError: ")
        assert "filter must answer alike on every rank" in filtering


def errs_on_one_rank(folder: Path) -> list[str]:
    """Make each of several mistakes on rank 1 only, and return what this rank raised."""
    said = []
    with get_strategy("ddp", guard_timeout=timedelta(seconds=30)) as strategy:
        first = strategy.global_rank == 0
        strategy.save_checkpoint(folder / "c", {"step": 1})
        for call in (
            lambda: strategy.save_checkpoint(folder / "c" if first else None, {"step": 1}),  # type: ignore[arg-type]
            lambda: strategy.save_checkpoint(folder / "c", {"step": 1} if first else 3),  # type: ignore[arg-type]
            lambda: strategy.save_checkpoint(folder / "c", {"mine": Speechless(strategy.global_rank)}),
            lambda: strategy.save_checkpoint(folder / "c", {}, state_dict_type="full" if first else "ful"),
            lambda: strategy.save_checkpoint(folder / "c", {}, state_dict_type="full" if first else None),
            lambda: strategy.save_checkpoint(folder / "c", {}, blocking=first),
            lambda: strategy.load_checkpoint(folder / "c", {} if first else {"model": nn.Linear(1, 1)}),
            lambda: strategy.latest_checkpoint(folder if first else None),  # type: ignore[arg-type]
        ):
            try:
                call()
            except ShardError as error:
                said.append(f"{type(error).__name__}: {error}")
        assert strategy.load_checkpoint(folder / "c") == {"step": 1}
    return said


def test_a_mistake_on_one_rank_is_an_error_on_all_and_keeps_none_waiting(tmp_path: Path) -> None:
    with World(2) as world:
        answers = world.run(errs_on_one_rank, tmp_path)
    parts = (
        "the path is of type NoneType",
        "state is of type int",
        "OSError: nothing to say",
        "state_dict_type 'ful' is none of",
        "rank 1 was given state_dict_type 'sharded', rank 0 'full'",
        "rank 1 saves with blocking=False, rank 0 with blocking=True",
        "this Linear was not set up",
        "the path is of type NoneType",
    )
    for sentences in answers:
        assert len(sentences) == len(parts), sentences
        assert all(part in sentence for part, sentence in zip(parts, sentences, strict=True)), sentences


def test_storage_that_returns_no_handle_is_told_to(tmp_path: Path) -> None:
    class Forgetful(CheckpointIO):
        def save(self, path: Any, state: Any, values: Any, **options: Any) -> SaveHandle:
            return None  # type: ignore[return-value]

        def load(self, path: Any, state: Any, **options: Any) -> LoadedCheckpoint:
            raise NotImplementedError

    with (
        get_strategy("single", checkpoint_io=Forgetful()) as strategy,
        pytest.raises(CheckpointError, match=r"Forgetful\.save returned None; let it return a SaveHandle"),
    ):
        strategy.save_checkpoint(tmp_path / "c", {"step": 1})


@pytest.mark.parametrize("places", [(0, 1), (1, 0)])
def test_a_group_without_parameters_keeps_its_learning_rate(tmp_path: Path, places: tuple[int, int]) -> None:
    strategy, module = get_strategy("single"), nn.Linear(3, 1)
    groups = [{"params": list(module.parameters())}, {"params": []}]
    optimizer = torch.optim.SGD([groups[place] for place in places], lr=0.3)
    module, (optimizer,) = strategy.setup_module_and_optimizers(module, [optimizer])
    strategy.save_checkpoint(tmp_path / "saved", {"model": module, "optimizer": optimizer})
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.5
    strategy.load_checkpoint(tmp_path / "saved", {"model": module, "optimizer": optimizer})
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.3]
