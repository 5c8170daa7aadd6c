"""How ranks share the model: copies, shards, what is freed when, and what travels over which axis."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor
from wire import Wire

from shard_core import InvalidOption, SetupError, ShardError, get_strategy
from shard_core.testing import models, oracle, set_up, train_under


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fsdp", {"sharding_strategy": "FULL"}, "sharding_strategy is 'FULL'.* did you mean|it can be: FULL_SHARD"),
        ("fsdp", {"sharding_strategy": 3}, "sharding_strategy is 3; it can be: FULL_SHARD, SHARD_GRAD_OP"),
        (
            "fsdp",
            {"sharding_strategy": "FULL_SHARD", "device_mesh": (2, 2)},
            r"'FULL_SHARD' makes one copy over all ranks, but device_mesh \(2, 2\) has an axis of copies; leave",
        ),
        ("hsdp", {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, "'SHARD_GRAD_OP' makes one copy"),
        ("hsdp", {"sharding_strategy": "NO_SHARD"}, "'NO_SHARD' leaves no choice to device_mesh"),
        (
            "fsdp",
            {"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True},
            "'SHARD_GRAD_OP' keeps whole parameters, but reshard_after_forward is True; leave one",
        ),
        (
            "fsdp",
            {"sharding_strategy": "HYBRID_SHARD", "reshard_after_forward": False},
            "'HYBRID_SHARD' frees whole parameters between forward and backward, but reshard_after_forward is False",
        ),
        ("fsdp", {"device_mesh": (2,)}, r"device_mesh is \(2,\); give \(copies, ranks that shard each\)"),
        ("fsdp", {"device_mesh": (2, 0)}, r"device_mesh is \(2, 0\); give \(copies"),
        ("fsdp", {"device_mesh": "2x2"}, "device_mesh is '2x2'; give"),
        ("fsdp", {"data_parallel_size": 0}, "data_parallel_size is 0; give a number of ranks from 1 up, or 'auto'"),
        ("fsdp", {"defer_sync": "al"}, "defer_sync is 'al'; did you mean 'all'"),
        ("fsdp", {"defer_sync": "all_reduce"}, "travels between copies, and there is one copy"),
    ],
)
def test_wrong_layouts_get_a_sentence(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        get_strategy(name, **options)


def laid_out(name: str, options: dict[str, Any]) -> Any:
    """Return the mesh, this rank's elements, and whether whole parameters are there between forward and backward."""
    with get_strategy(name, unit_bytes=1, **options) as strategy:
        model, _ = set_up(strategy, "gpt", "sgd")
        shape = dict(zip(strategy.device_mesh.mesh_dim_names, strategy.device_mesh.shape, strict=True))
        held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
        loss = model(*models.share_of(strategy, models.batches("gpt", 1, 12)[0]))
        # What blocks compute with, not what they list by themselves: the shards, freed of what was gathered.
        held_now = [next(iter(torch.nn.Module.named_parameters(block))) for block in model.blocks]
        whole = [not isinstance(parameter, DTensor) for _, parameter in held_now]
        strategy.backward(loss, model)
        return shape, held, whole


@pytest.mark.parametrize(
    ("name", "options", "mesh", "part", "whole"),
    [
        ("fsdp", {"sharding_strategy": ShardingStrategy.FULL_SHARD}, {"data_parallel": 2}, 2, False),
        ("fsdp", {"sharding_strategy": "SHARD_GRAD_OP"}, {"data_parallel": 2}, 2, True),
        ("fsdp", {"sharding_strategy": "HYBRID_SHARD"}, {"replicate": 1, "shard": 2}, 2, False),
        (
            "hsdp",
            {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "device_mesh": (2, "auto")},
            {"replicate": 2, "shard": 1},
            1,
            True,
        ),
        ("fsdp", {"sharding_strategy": "NO_SHARD"}, {"replicate": 2, "shard": 1}, 1, True),
        ("hsdp", {}, {"replicate": 1, "shard": 2}, 2, False),
    ],
)
def test_words_of_the_older_wrapper_keep_their_meaning(
    worlds: Any, name: str, options: dict[str, Any], mesh: dict[str, int], part: int, whole: bool
) -> None:
    total = sum(p.numel() for p in models.make("gpt").parameters())
    ranks = worlds(2).run(laid_out, name, options)
    for shape, held, there in ranks:
        assert shape == mesh
        assert held == pytest.approx(total / part, rel=0.02)
        assert there == [whole] * len(there)


def sizes_that_do_not_fit() -> list[str]:
    messages = []
    meshes = {"device_mesh": (3, "auto")}, {"device_mesh": (2, 2)}, {"data_parallel_size": 4}
    for options in meshes:
        strategy = get_strategy("fsdp", **options)
        with pytest.raises(InvalidOption) as error:
            strategy.setup_environment()
        messages.append(str(error.value))
        strategy.teardown()
    return messages


def test_sizes_that_do_not_fit_the_world_get_a_sentence(worlds: Any) -> None:
    for messages in worlds(2).run(sizes_that_do_not_fit):
        assert messages == [
            "a mesh of replicate=3, shard=auto needs a multiple of 3 ranks, but there are 2; replicate=2 would fit.",
            "a mesh of replicate=2, shard=2 needs 4 ranks, but there are 2; replicate=1 or shard=1 would fit.",
            "a mesh of data_parallel=4 needs 4 ranks, but there are 2; data_parallel=2 would fit.",
        ]


def meshes_that_do_not_fit() -> list[str]:
    messages = []
    with get_strategy("ddp"):
        for ranks in ([1, 0], [0]):
            strategy = get_strategy("fsdp", device_mesh=DeviceMesh("cpu", ranks))
            with pytest.raises(InvalidOption) as error:
                strategy.setup_environment()
            messages.append(str(error.value))
    return messages


def test_meshes_that_do_not_fit_the_world_get_a_sentence(worlds: Any) -> None:
    for messages in worlds(2).run(meshes_that_do_not_fit):
        assert messages == [
            "device_mesh is [1, 0]; let ranks ascend along each axis, as they do in torch's groups.",
            "device_mesh spans 1 of 2 ranks; give a mesh of all of them.",
        ]


def train(name: str, options: dict[str, Any]) -> Any:
    return train_under(name, options, "gpt", "adamw", steps=4, accumulate=2, clip=0.5)


def crosswise() -> Any:
    """Train on a mesh the user has made, where neighbours hold the same shards."""
    with get_strategy("ddp"):
        mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("rack", "host"))
        run = train("fsdp", {"device_mesh": mesh})
        with get_strategy("fsdp", device_mesh=mesh) as strategy:
            return run, strategy.device_mesh.mesh.tolist(), strategy.device_mesh.mesh_dim_names


@pytest.fixture(scope="module")
def truth() -> oracle.Trajectory:
    """Train like ``train`` in plain PyTorch."""
    return oracle.train(
        lambda: models.make("gpt"),
        lambda module: models.make_optimizer("adamw", module),
        models.batches("gpt", 8, 12),
        accumulate=2,
        clip=0.5,
    )


def test_no_shard_trains_like_plain_pytorch(worlds: Any, truth: oracle.Trajectory) -> None:
    oracle.assert_same(worlds(2).run(train, "fsdp", {"sharding_strategy": "NO_SHARD"})[0], truth)


@pytest.mark.long
def test_copies_of_shards_train_like_plain_pytorch(worlds: Any, truth: oracle.Trajectory) -> None:
    oracle.assert_same(worlds(4).run(train, "hsdp", {"device_mesh": (2, 2)})[0], truth)


@pytest.mark.long
def test_ranks_stand_where_the_users_mesh_has_them(worlds: Any, truth: oracle.Trajectory) -> None:
    run, mesh, names = worlds(4).run(crosswise)[0]
    oracle.assert_same(run, truth)
    assert (mesh, names) == ([[0, 2], [1, 3]], ("replicate", "shard"))


def messages(options: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Count the reductions, within copies and between them, of three micro-batches of which two are deferred."""
    with get_strategy("fsdp", **options) as strategy:
        model, _ = set_up(strategy, "plain", "sgd")
        batch = models.share_of(strategy, models.batches("plain", 1, 12)[0])
        counts = []
        for micro in range(3):
            with Wire() as wire, strategy.no_backward_sync(model, enabled=micro < 2):
                strategy.backward(model(*batch), model)
            counts.append((len(wire.scatters), len(wire.reductions)))
        return tuple(map(list, zip(*counts, strict=True)))


@pytest.mark.parametrize(
    ("size", "options", "within", "between"),
    [
        # A rank that holds a copy alone may or may not talk to itself.
        (2, {"device_mesh": (2, 1)}, None, [0, 0, 1]),
        (2, {"device_mesh": (2, 1), "defer_sync": "nothing"}, None, [1, 1, 1]),
        (2, {}, [0, 0, 1], [0, 0, 0]),
        (2, {"defer_sync": "nothing"}, [1, 1, 1], [0, 0, 0]),
        pytest.param(4, {"device_mesh": (2, 2)}, [1, 1, 1], [0, 0, 1], marks=pytest.mark.long),
        pytest.param(4, {"device_mesh": (2, 2), "defer_sync": "all"}, [0, 0, 1], [0, 0, 1], marks=pytest.mark.long),
        pytest.param(4, {"device_mesh": (2, 2), "defer_sync": "nothing"}, [1] * 3, [1] * 3, marks=pytest.mark.long),
    ],
)
def test_what_waits_for_the_last_micro_batch(
    worlds: Any, size: int, options: dict[str, Any], within: list[int] | None, between: list[int]
) -> None:
    for scatters, reductions in worlds(size).run(messages, options):
        assert within is None or scatters == within
        assert reductions == between


def gradients(options: dict[str, Any]) -> Any:
    with get_strategy("fsdp", **options) as strategy:
        model, _ = set_up(strategy, "scalar", "sgd")
        for micro, batch in enumerate(models.batches("scalar", 3, 12)):
            with strategy.no_backward_sync(model, enabled=micro < 2):
                strategy.backward(model(*models.share_of(strategy, batch)), model)
        return {
            name: (g.full_tensor() if isinstance(g := p.grad, DTensor) else g).clone()
            for name, p in model.named_parameters()
        }


@pytest.mark.parametrize("defer", ["all", "all_reduce", "nothing"])
@pytest.mark.parametrize(("size", "mesh"), [(2, (2, 1)), pytest.param(4, (2, 2), marks=pytest.mark.long)])
def test_what_is_deferred_arrives(worlds: Any, size: int, mesh: tuple[int, int], defer: str) -> None:
    torch.manual_seed(0)
    plain = models.make("scalar")
    for batch in models.batches("scalar", 3, 12):
        plain(*batch).backward()
    truth = {name: p.grad for name, p in plain.named_parameters()}
    for found in worlds(size).run(gradients, {"device_mesh": mesh, "defer_sync": defer}):
        oracle.assert_same_weights(found, truth, 1e-6)


class Early(nn.Module):
    """Runs as many of its blocks as it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor, blocks: int) -> torch.Tensor:
        for block in self.blocks[:blocks]:
            x = block(x).tanh()
        return x.sum()


def leaves_out(defer: str, forward_outside: bool = False) -> str | bool:
    """Leave a block out of the last micro-batch; return the error, or whether its gradient is there."""
    with get_strategy("hsdp", device_mesh=(2, 1), unit_bytes=1, defer_sync=defer) as strategy:
        model, _ = set_up(strategy, Early, "sgd")
        early = model(torch.ones(2, 4), 3) if forward_outside else None
        with strategy.no_backward_sync(model):
            strategy.backward(model(torch.ones(2, 4), 3) if early is None else early, model)
        try:
            strategy.backward(model(torch.ones(2, 4), 2), model)
        except SetupError as error:
            return str(error)
        return all(parameter.grad is not None for parameter in model.parameters())


def test_no_gradient_is_lost(worlds: Any) -> None:
    assert worlds(2).run(leaves_out, "all") == [True, True]
    for message in worlds(2).run(leaves_out, "auto") + worlds(2).run(leaves_out, "auto", True):
        assert message.startswith("'blocks.2' ran in a micro-batch whose gradients were deferred, but not in the last")


def waits(strategy: Any, timeout: float) -> float:
    """Leave out one rank's gradients and measure how long rank 0 waited for them; 0.0 if it went on."""
    model, _ = set_up(strategy, "plain", "sgd")
    loss = model(*models.share_of(strategy, models.batches("plain", 1, 12)[0]))
    strategy.barrier("before the backward that one rank leaves out")
    began = time.monotonic()
    if strategy.global_rank == 3:
        time.sleep(3 * timeout)  # or its leaving would be noticed first
        return 0.0
    try:
        strategy.backward(loss, model)
    except (RuntimeError, ShardError):
        return time.monotonic() - began
    return 0.0


@pytest.mark.long
def test_the_timeout_holds_where_a_rank_stays_away() -> None:
    # Ranks of their own: the process group of all is one that the strategy makes, with its timeout.
    strategy = get_strategy("hsdp", devices=4, device_mesh=(2, 2), timeout=timedelta(seconds=3))
    assert 2.0 < strategy.launch(waits, 3.0) < 8.0


class Either(nn.Module):
    """Has two layers, and runs one of them."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4, bias=bias)

    def forward(self, x: torch.Tensor, side: str) -> torch.Tensor:
        return getattr(self, side)(x).square().mean()


def one_after_the_other(defer: str, bias: bool) -> Any:
    """Return the gradients after a deferred micro-batch through one layer and a last one through the other."""
    with get_strategy("hsdp", device_mesh=(2, 1), defer_sync=defer) as strategy:
        torch.manual_seed(0)
        model = strategy.setup_module(Either(bias=bias))
        batch = torch.ones(2, 4) * (1 + strategy.global_rank)
        for side in ("left", "right"):
            loss = model(batch, side)
            try:
                with strategy.no_backward_sync(model, enabled=side == "left"):
                    strategy.backward(loss, model)
            except SetupError as error:
                return str(error)
        return strategy.module_gradients(model)


@pytest.mark.parametrize("bias", [True, False], ids=["as many", "fewer"])
def test_deferred_gradients_are_not_added_to_those_of_other_parameters(worlds: Any, bias: bool) -> None:
    for message in worlds(2).run(one_after_the_other, "all_reduce", bias):
        assert message.startswith("micro-batches of one step reached different parameters of the root unit, ")
        assert message.endswith("pass defer_sync='all', or leave no_backward_sync out.")
    torch.manual_seed(0)
    plain = Either(bias=bias)
    for rank in range(2):
        for side in ("left", "right"):
            (plain(torch.ones(2, 4) * (1 + rank), side) / 2).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    oracle.assert_same_weights(worlds(2).run(one_after_the_other, "all", bias)[0], expected, 1e-5)
