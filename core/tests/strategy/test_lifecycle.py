"""A strategy starts where it is set to, joins what exists, and leaves nothing behind."""

import dataclasses
import functools
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shard_core import get_strategy
from shard_core.errors import BrokenBackend, CollectiveError, InvalidOption, LaunchError, MissingCapability, MissingRank
from shard_core.strategies.ddp import DDPStrategy
from shard_core.strategies.single import SingleStrategy


def returns(strategy: Any, *args: Any) -> Any:
    return strategy.world_size, strategy.is_global_zero, args


def test_a_world_of_one_runs_in_this_process() -> None:
    assert get_strategy("single").launch(returns, 1, "two") == (1, True, (1, "two"))


def test_nothing_starts_before_it_is_asked_for() -> None:
    strategy = get_strategy("ddp", devices=1)
    assert not dist.is_initialized()
    assert repr(strategy).startswith("DDPStrategy('ddp', precision='32-true'")


def test_ddp_of_one_rank_starts_and_stops_alone() -> None:
    with get_strategy("ddp") as strategy:
        assert dist.is_initialized()
        assert (strategy.global_rank, strategy.local_rank, strategy.world_size) == (0, 0, 1)
        assert strategy.root_device == torch.device("cpu")
        assert strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
        strategy.setup_environment()
    assert not dist.is_initialized()
    strategy.teardown()


def test_more_ranks_than_were_started_are_refused_with_the_cure() -> None:
    with pytest.raises(
        LaunchError, match=r"devices=3 asks for 3 ranks, but this process is alone; call strategy.launch"
    ):
        get_strategy("ddp", devices=3).setup_environment()


def test_far_more_ranks_than_cpus_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"devices=9999 asks for 9999 ranks, but this host has \d+ CPUs"):
        get_strategy("ddp", devices=9999).launch(returns)


@pytest.mark.parametrize(
    "options", [{"devices": 2}, {"num_nodes": 2}, {"parallel_devices": [torch.device("cpu"), torch.device("cpu")]}]
)
def test_single_does_not_start_several_ranks(options: dict[str, Any]) -> None:
    with pytest.raises(LaunchError, match="strategy 'single' runs on at most 1 rank, not on 2; `shard list`"):
        get_strategy("single", **options).launch(returns)


def test_what_cannot_be_called_is_not_launched() -> None:
    with pytest.raises(LaunchError, match=r"launch\(\) was given 3; give a function that takes the strategy"):
        get_strategy("ddp", devices=2).launch(3)  # type: ignore[arg-type]


def test_a_part_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(InvalidOption, match="checkpoint_io is 3; give a CheckpointIO"):
        get_strategy("ddp", checkpoint_io=3)


def test_a_backend_torch_lacks_is_named() -> None:
    with pytest.raises(
        CollectiveError, match=r"no process group backend 'glooo' here; did you mean 'gloo'\? it has: gloo"
    ):
        get_strategy("ddp", process_group_backend="glooo").setup_environment()


def test_several_hosts_need_a_launcher() -> None:
    with pytest.raises(LaunchError, match="num_nodes=2 needs a launcher on every host"):
        get_strategy("ddp", num_nodes=2).setup_environment()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_an_accelerator_that_is_not_there_is_named() -> None:
    with pytest.raises(LaunchError, match="'cuda' was asked for, but torch sees no CUDA device"):
        get_strategy("ddp", accelerator="cuda").setup_environment()


def test_an_accelerator_the_strategy_does_not_run_on_is_refused() -> None:
    with pytest.raises(
        InvalidOption, match="accelerator 'tpu' is not one strategy 'ddp' runs on; it runs on: cpu, cuda"
    ):
        get_strategy("ddp", accelerator="tpu").setup_environment()


def test_several_devices_are_as_many_ranks() -> None:
    with pytest.raises(LaunchError, match=r"parallel_devices=\['cpu', 'cpu'\] asks for 2 ranks, but this process"):
        get_strategy("ddp", parallel_devices=[torch.device("cpu")] * 2).setup_environment()


def test_one_device_is_a_world_of_one() -> None:
    with get_strategy("ddp", accelerator="cpu", devices=1, parallel_devices=["cpu"]) as strategy:
        assert (strategy.world_size, strategy.root_device) == (1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["meta"], "parallel_devices names 'meta' devices, and strategy 'ddp' runs on: cpu, cuda"),
        (["cpu:1", "cpu:0"], "parallel_devices names cpu:1, and a rank sees one cpu device only; leave the number out"),
        (["cuda", "cuda:0"], "parallel_devices names cuda:0 twice; every rank needs its own"),
        pytest.param(
            ["cuda:7"],
            r"parallel_devices=\['cuda:7'\] was asked for, but torch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device"),
        ),
        (["cpu"] * 9999, r"parallel_devices=.* asks for 9999 ranks, but this host has \d+ CPUs"),
    ],
    ids=["kind", "number", "twice", "absent", "many"],
)
@pytest.mark.parametrize("start", ["launch", "setup_environment"])
def test_devices_that_cannot_be_ranks_are_refused(devices: Any, message: str, start: str) -> None:
    strategy = get_strategy("ddp", parallel_devices=devices)
    with pytest.raises((LaunchError, InvalidOption), match=message):
        getattr(strategy, start)(*[returns] * (start == "launch"))
    assert not dist.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_that_is_not_there_is_named() -> None:
    with pytest.raises(LaunchError, match="asks for device 99 of type cuda, but this host has"):
        get_strategy("ddp", parallel_devices=["cuda:99"]).launch(returns)


@pytest.mark.parametrize("strategy_type", [SingleStrategy, DDPStrategy])
def test_unknown_options_of_a_class_are_refused(strategy_type: Any) -> None:
    with pytest.raises(InvalidOption, match="has no option 'devises'; did you mean 'devices'"):
        strategy_type(devises=2)


@pytest.mark.parametrize("name", ["config_type", "default_info"])
def test_a_class_that_lacks_what_its_author_sets_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DDPStrategy, name)
    with pytest.raises(BrokenBackend, match=rf"DDPStrategy has no {name}; set it in the class, to the .*\.$"):
        DDPStrategy(info=get_strategy("single").info)


def test_a_plain_value_that_makes_a_name_untrue_is_refused() -> None:
    info = dataclasses.replace(DDPStrategy.default_info, name="ddp_static", presets={"static_graph": True})
    assert DDPStrategy(info=info, static_graph=True).config.static_graph
    with pytest.raises(InvalidOption, match="static_graph is False, but strategy 'ddp_static' stands for static_graph"):
        DDPStrategy(info=info, static_graph=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb is '25'; give a number of MiB"),
        ({"bucket_cap_mb": 0}, "give a number of MiB above zero"),
        ({"static_graph": 1}, "static_graph is 1; give True or False"),
        ({"collectives": "mpi"}, "strategy 'ddp' has no collectives 'mpi'; it has: 'process_group'"),
        ({"collectives": "proces_group"}, "no collectives 'proces_group'; did you mean 'process_group'[?] it has: "),
    ],
)
def test_wrong_values_get_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        get_strategy("ddp", **options)


def test_what_a_strategy_does_not_promise_raises() -> None:
    strategy = get_strategy("single")
    strategy.info = type(strategy.info)(name="bare", summary="", factory="")
    with pytest.raises(
        MissingCapability, match="'bare' does not promise INFERENCE: it is not one that sets up a module"
    ):
        strategy.setup_module(torch.nn.Linear(1, 1))


def joins() -> Any:
    with get_strategy("ddp") as strategy:
        gathered = strategy.all_gather(torch.tensor([strategy.global_rank])).flatten().tolist()
    return gathered, dist.is_initialized()


def test_an_existing_process_group_is_used_and_left_alone(worlds: Any) -> None:
    assert worlds(2).run(joins) == [([0, 1], True)] * 2


def wrong_number(**options: Any) -> str:
    with pytest.raises(LaunchError) as error:
        get_strategy("ddp", **options).setup_environment()
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "asked"),
    [({"devices": 5}, "devices=5"), ({"parallel_devices": ["cpu"] * 5}, "parallel_devices=['cpu', 'cpu', 'cpu', ...")],
    ids=["devices", "parallel_devices"],
)
def test_a_launcher_that_started_another_number_is_named(worlds: Any, options: Any, asked: str) -> None:
    for message in worlds(2).run(functools.partial(wrong_number, **options)):
        assert message.startswith(asked)
        assert "asks for 5 ranks on this host, but torchrun started 2" in message


def single_in_a_crowd() -> str:
    with pytest.raises(LaunchError) as error:
        get_strategy("single").setup_environment()
    return str(error.value)


def test_single_refuses_to_be_one_of_several(worlds: Any) -> None:
    assert all("runs on at most 1 rank, not on 2" in message for message in worlds(2).run(single_in_a_crowd))


def waits_for_absent(name: str) -> str:
    with get_strategy("ddp", guard_timeout=timedelta(seconds=1)) as strategy:
        message = ""
        if strategy.global_rank != 1:
            with pytest.raises(MissingRank) as error:
                getattr(strategy, name)(*(["value"] if name == "broadcast" else ["epoch end"]))
            message = str(error.value)
        dist.barrier()
        return message


@pytest.mark.parametrize("name", ["barrier", "broadcast"])
def test_a_rank_that_does_not_come_is_named_on_every_other(worlds: Any, name: str) -> None:
    messages = worlds(3).run(waits_for_absent, name)
    for rank in (0, 2):
        assert f"rank {rank} waited 1 s in" in messages[rank]
        assert "for rank 1 (never seen)" in messages[rank] or "for rank 1 (last seen at" in messages[rank]
        assert "rank 0 (" not in messages[rank]


def start_with(precisions: list[str], caps: list[int]) -> str:
    """Start with options by rank; return the refusal."""
    rank = int(os.environ["RANK"])
    try:
        with get_strategy("ddp", precision=precisions[rank], bucket_cap_mb=caps[rank]):
            return "started"
    except InvalidOption as error:
        return str(error)


def test_options_that_differ_between_ranks_are_refused_on_all(worlds: Any) -> None:
    alike = ["32-true", "32-true"]
    assert worlds(2).run(start_with, alike, [25, 25]) == ["started"] * 2
    for message in worlds(2).run(start_with, alike, [25, 10]):
        assert message.startswith("bucket_cap_mb is 10 on rank 1 and 25 on rank 0; give every rank the same options")
    for message in worlds(2).run(start_with, ["32-true", "bf16-mixed"], [25, 25]):
        assert message.startswith("precision is 'bf16-mixed' on rank 1 and '32-true' on rank 0")
