"""Engines beside and after one another, options that change nothing, stage 0, and errors of one rank alone."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import MissingCapability, SetupError, get_strategy
from shard_core.testing import models, oracle, set_up, step, whole_weights

_STEPS, _BATCH = 4, 12


def train_and_leave(name: str) -> list[bool]:
    """Train modules by a loss of two forwards, one module a strategy; return which of them are held afterwards."""
    trained = []
    for _ in range(2):
        with get_strategy(name) as strategy:
            model, optimizer = set_up(strategy, "plain", "sgd")
            trained.append(weakref.ref(strategy.unwrap(model)))
            batches = models.batches("plain", 2, _BATCH)
            strategy.backward(sum(model(*models.share_of(strategy, each)) for each in batches), model)
            strategy.optimizer_step(optimizer)
        del strategy, model, optimizer
    gc.collect()
    return [each() is not None for each in trained]


def leave_after_a_failed_part() -> bool:
    """Call a part past the module, whose layer is refused; return whether the module is held afterwards."""
    with get_strategy("deepspeed_stage_3") as strategy:
        module = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
        kept = weakref.ref(module)
        strategy.setup_module_and_optimizers(module, [torch.optim.SGD(module.parameters(), 0.1)])
        with pytest.raises(MissingCapability, match="a Linear inside Sequential was called"):
            module[0](torch.ones(2, 8))
    del strategy, module
    gc.collect()
    return kept() is not None


def test_teardown_lets_go_of_a_module_whose_part_has_failed(worlds: Any) -> None:
    assert worlds(2).run(leave_after_a_failed_part) == [False] * 2


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_teardown_lets_go_of_the_module(worlds: Any, name: str) -> None:
    assert worlds(2).run(train_and_leave, name) == [[False, False]] * 2


def gpt_truth(accumulate: int = 1) -> oracle.Trajectory:
    return oracle.train(
        lambda: models.make("gpt"),
        lambda module: models.make_optimizer("sgd", module),
        models.batches("gpt", _STEPS * accumulate, _BATCH),
        accumulate=accumulate,
    )


def train_gpt(options: dict[str, Any], accumulate: int, defer: bool) -> oracle.Trajectory | None:
    with get_strategy(**options) as strategy:
        model, optimizer = set_up(strategy, "gpt", "sgd")
        batches = models.batches("gpt", _STEPS * accumulate, _BATCH)
        losses, norms = [], []
        for start in range(0, len(batches), accumulate):
            total = 0.0
            for number, batch in enumerate(batches[start : start + accumulate]):
                with strategy.no_backward_sync(model, enabled=defer and number < accumulate - 1):
                    loss = model(*models.share_of(strategy, batch)) / accumulate
                    strategy.backward(loss, model)
                total += strategy.all_reduce(loss.detach()).item()
            losses.append(total)
            norms.append(strategy.clip_gradients_norm(model, optimizer, float("inf")).item())
            assert strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        weights = strategy.module_state_dict(model)
        return oracle.Trajectory(losses=losses, norms=norms, weights=weights) if strategy.is_global_zero else None


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 0},
        {"zero_optimization": False},
        {"stage": 1, "overlap_comm": False},
        {"stage": 1, "contiguous_gradients": False, "reduce_scatter": False, "reduce_bucket_size": 5000},
        {"stage": 2, "overlap_comm": False, "reduce_scatter": False, "reduce_bucket_size": 500},
        {"stage": 2, "contiguous_gradients": False, "reduce_bucket_size": 5000},
        {"stage": 3, "sub_group_size": 5000, "overlap_comm": False},
        {"stage": 3, "sub_group_size": 5000, "param_persistence_threshold": 100, "reduce_bucket_size": 5000},
        {"stage": 3, "contiguous_gradients": False, "param_persistence_threshold": 0},
        {"stage": 3, "reduce_scatter": False, "param_persistence_threshold": 0},
    ],
    ids=str,
)
def test_options_change_nothing_in_the_result(worlds: Any, options: dict[str, Any]) -> None:
    answers = worlds(2).run(train_gpt, {"name": "deepspeed", **options}, 2, False)
    oracle.assert_same(answers[0], gpt_truth(2))


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_sent_in_every_backward_changes_nothing(worlds: Any, stage: int) -> None:
    answers = worlds(2).run(train_gpt, {"name": f"deepspeed_stage_{stage}"}, 3, True)
    oracle.assert_same(answers[0], gpt_truth(3))


def says(options: dict[str, Any]) -> bool:
    with get_strategy(**options) as strategy:
        return strategy.engine_defers_sync


def test_the_stage_says_whether_sync_is_deferred() -> None:
    assert [says({"name": "deepspeed", "stage": stage}) for stage in range(4)] == [True, True, False, False]
    assert [says({"name": f"deepspeed_stage_{stage}"}) for stage in (1, 2, 3)] == [True, False, False]


@pytest.mark.parametrize("overlap", [True, False])
def test_deferred_gradients_are_averaged_once(worlds: Any, overlap: bool) -> None:
    answers = worlds(2).run(train_gpt, {"name": "deepspeed_stage_1", "overlap_comm": overlap}, 3, True)
    oracle.assert_same(answers[0], gpt_truth(3))


class Forked(nn.Module):
    """Which of two layers a forward uses is chosen by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, left: bool) -> torch.Tensor:
        return nn.functional.mse_loss((self.left if left else self.right)(inputs), targets)


def fork(options: dict[str, Any], defer: bool) -> dict[str, torch.Tensor]:
    with get_strategy(**options) as strategy:
        model, optimizer = set_up(strategy, Forked, lambda module: torch.optim.SGD(module.parameters(), lr=1.0))
        for number, batch in enumerate(models.batches("plain", 4, _BATCH)):
            with strategy.no_backward_sync(model, enabled=defer and number % 2 == 0):
                strategy.backward(model(*models.share_of(strategy, batch), number % 2 == 0), model)
            if number % 2:
                strategy.optimizer_step(optimizer)
                optimizer.zero_grad()
        return whole_weights(strategy, model)


@pytest.mark.parametrize(
    ("options", "defer"),
    [
        ({"name": "deepspeed_stage_1"}, True),
        ({"name": "deepspeed_stage_1", "overlap_comm": False}, True),
        ({"name": "deepspeed_stage_2"}, False),
        ({"name": "deepspeed_stage_3", "param_persistence_threshold": 0}, False),
        ({"name": "deepspeed", "stage": 0}, False),
    ],
    ids=str,
)
def test_micro_batches_may_reach_other_parameters(worlds: Any, options: dict[str, Any], defer: bool) -> None:
    torch.manual_seed(0)
    model = Forked()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for number, batch in enumerate(models.batches("plain", 4, _BATCH)):
        model(*batch, number % 2 == 0).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    for weights in worlds(2).run(fork, options, defer):
        oracle.assert_same_weights(weights, model.state_dict(), 1e-6, elementwise=True)


def interleave(stage: int) -> list[dict[str, torch.Tensor]]:
    """Train two models by two strategies in turn, tear one down, and go on with the other."""
    options = {"param_persistence_threshold": 0} if stage == 3 else {}
    first, second = (get_strategy("deepspeed", stage=stage, **options) for _ in range(2))
    batches = models.batches("plain", _STEPS, _BATCH)
    with first:
        with second:
            pairs = [set_up(each, name, "adamw") for each, name in ((first, "uneven"), (second, "plain"))]
            for batch in batches[:2]:
                for each, (model, optimizer) in zip((first, second), pairs, strict=True):
                    step(each, model, optimizer, batch)
            found = [whole_weights(second, pairs[1][0])]
        for batch in batches[2:]:
            step(first, *pairs[0], batch)
        return [whole_weights(first, pairs[0][0]), *found]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_engines_train_beside_each_other(worlds: Any, stage: int) -> None:
    for weights in worlds(2).run(interleave, stage):
        for found, name, steps in zip(weights, ("uneven", "plain"), (_STEPS, 2), strict=True):
            truth = oracle.train(
                lambda name=name: models.make(name),  # type: ignore[misc]
                lambda module: models.make_optimizer("adamw", module),
                models.batches("plain", _STEPS, _BATCH)[:steps],
            )
            oracle.assert_same_weights(found, truth.weights, 1e-5)


def again(stage: int) -> list[list[float]]:
    runs = []
    for _ in range(3):
        with get_strategy("deepspeed", stage=stage) as strategy:
            model, optimizer = set_up(strategy, "uneven", "adamw")
            runs.append([step(strategy, model, optimizer, b) for b in models.batches("uneven", _STEPS, _BATCH)])
    return runs


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_after_teardown_is_like_the_first(worlds: Any, stage: int) -> None:
    for runs in worlds(2).run(again, stage):
        assert runs[0] == runs[1] == runs[2]


def alone(stage: int) -> list[float]:
    losses = []
    for _ in range(2):
        run = get_strategy("deepspeed", stage=stage, devices=1).launch(train_alone)
        assert run is not None
        losses.append(run)
    return losses


def train_alone(strategy: Any) -> float:
    model, optimizer = set_up(strategy, "plain", "adamw")
    return [step(strategy, model, optimizer, batch) for batch in models.batches("plain", 3, _BATCH)][-1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_process_groups_may_be_made_again(stage: int) -> None:
    first, second = alone(stage)
    assert first == second


class Shampoo(torch.optim.Optimizer):
    """Preconditions a matrix from both sides, by statistics of rows and of columns (Gupta et al., 2018, alg. 1)."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                matrix, state = p.grad.reshape(len(p), -1), self.state[p]
                for side, statistics in (("left", matrix @ matrix.T), ("right", matrix.T @ matrix)):
                    state[side] = state.get(side, 1e-4 * torch.eye(len(statistics))) + statistics
                update = inverse_root(state["left"]) @ matrix @ inverse_root(state["right"])
                p.sub_(update.view_as(p), alpha=group["lr"])


def inverse_root(matrix: torch.Tensor) -> torch.Tensor:
    """Compute the inverse fourth root of a symmetric, positive matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=1e-12) ** -0.25) @ vectors.T


def refused(kind: str) -> str:
    with get_strategy("deepspeed_stage_2") as strategy:
        module = models.make("plain")
        matrices = [p for p in module.parameters() if p.ndim == 2]
        made: Any = {"Adafactor": torch.optim.Adafactor, "Muon": torch.optim.Muon, "Shampoo": Shampoo}[kind](matrices)
        with pytest.raises(MissingCapability) as error:
            strategy.setup_module_and_optimizers(module, [made])
        return str(error.value)


@pytest.mark.parametrize("kind", ["Adafactor", "Muon", "Shampoo"])
def test_optimizers_of_whole_matrices_are_refused_by_name(worlds: Any, kind: str) -> None:
    for message in worlds(2).run(refused, kind):
        assert kind in message
        assert "ANY_OPTIMIZER" in message


def around(what: str, stage: int) -> str:
    """Call what is torch's where the strategy's own is due."""
    with get_strategy("deepspeed", stage=stage) as strategy:
        model, optimizer = set_up(strategy, "plain", "adamw")
        for batch in models.batches("plain", 2, _BATCH):
            step(strategy, model, optimizer, batch)
        before = whole_weights(strategy, model)
        loss = model(*models.share_of(strategy, batch))
        if what == "backward":
            loss.backward()
        else:
            strategy.backward(loss, model)
        with pytest.raises(SetupError) as error:
            type(optimizer).step(optimizer) if what == "step" else strategy.optimizer_step(optimizer)
        oracle.assert_same_weights(whole_weights(strategy, model), before, 0.0)
    if stage:
        with pytest.raises(SetupError, match="whose strategy was torn down"):
            optimizer.step()
    else:
        optimizer.step()  # it is torch's again
    return str(error.value)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("what", "instead"), [("backward", "strategy.backward(loss"), ("step", "strategy.optimizer_step(optimizer)")]
)
def test_a_call_that_goes_around_the_engine_is_refused(worlds: Any, what: str, instead: str, stage: int) -> None:
    for message in worlds(2).run(around, what, stage):
        assert instead in message


class Nothing(nn.Module):
    """Parameters without elements alone, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Parameter(torch.empty(0, 6)), nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.trained.sum() + self.frozen.sum()


class WithNothing(nn.Module):
    """Two layers, a part with nothing in it between them, and a parameter without elements beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(6, 5), Nothing(), nn.Linear(5, 3)
        self.nothing = nn.Parameter(torch.empty(0, 6))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs = self.last(self.between(torch.tanh(self.first(inputs))))
        return nn.functional.mse_loss(outputs + self.nothing.sum(), targets)


def look_at(model: nn.Module, stage: int) -> None:
    """Gather all parameters by hand, and let go of them."""
    if stage == 3:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            assert model.between.trained.shape == (0, 6)


def with_nothing(stage: int, optimizer: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    with get_strategy("deepspeed", stage=stage, **options) as strategy:
        model, made = set_up(strategy, WithNothing, optimizer)
        for batch in models.batches("plain", _STEPS, _BATCH):
            look_at(model, stage)
            loss = model(*models.share_of(strategy, batch))
            look_at(model, stage)
            strategy.backward(loss, model)
            strategy.optimizer_step(made)
            made.zero_grad()
        return whole_weights(strategy, model)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("stage", "options"), [(2, {}), (3, {}), (3, {"param_persistence_threshold": 0, "sub_group_size": 10})], ids=str
)
def test_parameters_without_elements_are_left_as_they_are(
    worlds: Any, stage: int, options: dict[str, Any], optimizer: str
) -> None:
    batches = models.batches("plain", _STEPS, _BATCH)
    truth = oracle.train(WithNothing, lambda module: models.make_optimizer(optimizer, module), batches)
    for weights in worlds(2).run(with_nothing, stage, optimizer, options):
        assert weights["between.trained"].shape == (0, 6)
        oracle.assert_same_weights(weights, truth.weights, 1e-5)
