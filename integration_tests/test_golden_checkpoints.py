"""What this tree's format has once written is read for ever: checkpoints that are committed, of each kind one.

Every expected number is computed by formulas in ``golden_contents.py``; how the files came about, ``golden_live.py``
shows.
"""

from typing import Any

import pytest
import torch
from click.testing import CliRunner
from golden_contents import SCALER, drawn_after_seeding, next_samples, plain, tally, values
from golden_list import FOLDER, GOLDENS, RUN, RUN_STEPS, Golden
from golden_live import Reading, hyper_parameters, newest_of_run, rates_to_come, read

from shard_core.cli.main import main
from shard_core.testing.bits import Bits, assert_same_bits

READERS = {"single": 1, "fsdp": 2}
each_golden = pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
#: How kernels compute, not what: never restored.
KERNELS = {"foreach", "fused", "capturable", "differentiable"}


def test_every_golden_checkpoint_is_read() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {RUN.name, *(golden.name for golden in GOLDENS)}


@each_golden
def test_verify(golden: Golden) -> None:
    result = CliRunner().invoke(main, ["checkpoint", "verify", str(golden.path)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("reader", READERS)
@each_golden
def test_read_exactly(worlds: Any, golden: Golden, reader: str) -> None:
    readings: list[Reading] = worlds(READERS[reader]).run(read, reader, golden)
    model, optimizers, scheduler = plain(golden)
    assert_same_bits(f"under {reader}", readings[0].bits, bits(model, optimizers))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    groups = {name: hyper_parameters(optimizer) for name, optimizer in optimizers.items()}
    scheduled = scheduler.last_epoch, scheduler.get_last_lr()
    to_come = rates_to_come(scheduler)
    for reading in readings:
        assert reading.tied
        assert reading.frozen == frozen
        assert {name: [without(each, KERNELS) for each in found] for name, found in reading.groups.items()} == {
            name: [without(each, KERNELS) for each in truth] for name, truth in groups.items()
        }
        assert (reading.scheduler, reading.rates_to_come) == (scheduled, to_come)
        assert_values(reading, golden, streams=golden.streams and len(readings) == golden.size)
    assert_generators(readings, golden)


def assert_values(reading: Reading, golden: Golden, *, streams: bool) -> None:
    lacking = set() if streams or not golden.streams else {"stream"}
    assert set(reading.left) == lacking
    assert reading.plain == values()
    assert_same(reading.tally, tally(golden))
    assert reading.scaler == (SCALER if golden.precision == "16-mixed" else {})
    assert reading.samples == without(next_samples(), set() if streams else {"stream"})


def assert_generators(readings: list[Reading], golden: Golden) -> None:
    """Check generators: at the ranks of the save each goes on where it stood; at others each draws its own anew."""
    drawn = [reading.drawn for reading in readings]
    continued = [drawn_after_seeding(rank) for rank in range(golden.ranks)]
    if golden.rank_places == tuple(range(len(readings))):
        assert drawn == continued
    else:
        assert all(numbers not in continued for numbers in drawn)
        assert len({numbers["torch"] for numbers in drawn}) == len(drawn)


def assert_same(mine: Any, truth: Any) -> None:
    """Compare nested values; tensors by dtype, shape and every byte."""
    assert type(mine) is type(truth)
    if isinstance(truth, torch.Tensor):
        assert (mine.dtype, mine.shape) == (truth.dtype, truth.shape)
        assert torch.equal(mine.reshape(-1).view(torch.uint8), truth.reshape(-1).view(torch.uint8))
    elif isinstance(truth, dict):
        assert mine.keys() == truth.keys()
        for key in truth:
            assert_same(mine[key], truth[key])
    else:
        assert len(mine) == len(truth)
        for each, true in zip(mine, truth, strict=True):
            assert_same(each, true)


def test_another_size_draws_the_same_anew_every_time(worlds: Any) -> None:
    golden = next(golden for golden in GOLDENS if golden.size == 1)
    first, second = (worlds(2).run(read, "fsdp", golden) for _ in range(2))
    assert [reading.drawn for reading in first] == [reading.drawn for reading in second]


@pytest.mark.parametrize("reader", READERS)
def test_newest_of_a_run(worlds: Any, reader: str) -> None:
    found = worlds(READERS[reader]).run(newest_of_run, reader)
    assert found == [(RUN / f"step-{RUN_STEPS[-1]}", {"step": RUN_STEPS[-1]})] * READERS[reader]


def bits(model: torch.nn.Module, optimizers: dict[str, torch.optim.Optimizer]) -> Bits:
    """List every tensor by the names they have in state dicts of whole tensors."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for optimizer in optimizers.values():
        for parameter, slots in optimizer.state.items():
            found |= {f"optim.{names[parameter]}.{slot}": value for slot, value in slots.items()}
    return found


def without(values: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}
