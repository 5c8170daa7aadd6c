"""Random numbers after a load go on where those of the checkpoint stood."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from shard_core import get_strategy
from shard_core.randomness import check_generator_states, generator_states, seed_everything, set_generator_states


def drawn():
    return random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))


def small(strategy, seed):
    strategy.seed_everything(seed)
    with strategy.module_init_context():
        module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, (optimizer,) = strategy.setup_module_and_optimizers(module, [optimizer])
    return {"model": module, "optimizer": optimizer}


def save_and_draw(path):
    with get_strategy("ddp") as strategy:
        state = small(strategy, 0)
        drawn()  # so that a Gaussian is kept for later
        strategy.save_checkpoint(path, state)
        return drawn()


def load_and_draw(name, path, keys=("model", "optimizer")):
    with get_strategy(name) as strategy:
        state = small(strategy, 1)
        before = generator_states(torch.device("cpu"))
        left = strategy.load_checkpoint(path, {key: state[key] for key in keys})
        now = drawn()
        set_generator_states(before, torch.device("cpu"))
        return now, drawn(), left


def test_every_rank_goes_on_where_it_stood(worlds, tmp_path):
    expected = worlds(2).run(save_and_draw, tmp_path / "saved")
    assert expected[0] != expected[1]
    answers = worlds(2).run(load_and_draw, "ddp", tmp_path / "saved")
    assert [now for now, _, _ in answers] == expected
    assert all(left == {} for _, _, left in answers)


def test_other_ranks_derive_theirs_from_where_the_first_stood(worlds, tmp_path):
    saved = worlds(2).run(save_and_draw, tmp_path / "saved")
    first = [now for now, _, _ in worlds(3).run(load_and_draw, "ddp", tmp_path / "saved")]
    again = [now for now, _, _ in worlds(3).run(load_and_draw, "ddp", tmp_path / "saved")]
    assert first == again
    assert len({*first, *saved}) == 5


def test_a_load_without_an_optimizer_leaves_them_alone(worlds, tmp_path):
    worlds(1).run(save_and_draw, tmp_path / "saved")
    ((now, undisturbed, _),) = worlds(1).run(load_and_draw, "single", tmp_path / "saved", ("model",))
    assert now == undisturbed


def _row(name, change):
    """Change a generator's state on all ranks."""

    def changed(saved):
        saved["generators"][name] = change(saved["generators"][name])

    return changed


def _at(name, place, value):
    def change(rows):
        rows = rows.clone()
        rows[:, place] = value
        return rows

    return _row(name, change)


FORGED = {
    "none": lambda saved: saved.clear(),
    "no ranks": lambda saved: saved.update(data_ranks=[]),
    "ranks that are none": lambda saved: saved.update(data_ranks=3),
    "a rank too many": lambda saved: saved["data_ranks"].append(7),
    "generators that are none": lambda saved: saved.update(generators=[1]),
    "text for a tensor": lambda saved: saved["generators"].update(torch="gASV"),
    "a number for a tensor": lambda saved: saved["generators"].update(torch=torch.tensor(3)),
    "torch, other dtype": _row("torch", lambda rows: rows.to(torch.int64)),
    "torch, cut short": _row("torch", lambda rows: rows[:, :-1]),
    "torch, nothing": _row("torch", torch.zeros_like),
    "torch, noise": _row("torch", lambda rows: torch.full_like(rows, 255)),
    "torch lacks": lambda saved: saved["generators"].pop("torch"),
    "python, other dtype": _row("python", lambda rows: rows.double()),
    "python, another shape": _row("python", lambda rows: rows[:, None]),
    "python, a word too large": _at("python", 5, 2**40),
    "python, a negative word": _at("python", 5, -1),
    "python, beyond its words": _at("python", -2, 625),
    "python, an odd flag": _at("python", -1, 2),
    "python, no gauss": _row("python_gauss", lambda rows: rows.int()),
    "numpy, a word too large": _at("numpy", 0, 2**32),
    "numpy, beyond its words": _at("numpy", -2, 10**9),
    "numpy, before its words": _at("numpy", -2, -5),
    "numpy, an odd flag": _at("numpy", -1, -1),
}


def load_forged(path, forged):
    """Return the error for each forged state, by its name."""
    said = {}
    with get_strategy("ddp") as strategy:
        state = {**small(strategy, 1), "note": "mine"}
        strategy.save_checkpoint(path, state)
        io = strategy.checkpoint_io
        load = io.load

        def live():
            slots = [value for held in state["optimizer"].state.values() for value in held.values()]
            return [*(parameter.detach() for parameter in state["model"].parameters()), *slots]

        with torch.no_grad():
            for tensor in live():
                tensor += 1  # else nobody would see that it was loaded
        for name in forged:

            def load_and_forge(*arguments, take_values, name=name, **options):
                def forge_and_take(values):
                    # Rank 1's copy of the checkpoint is another than rank 0's.
                    if strategy.global_rank == 1 or strategy.world_size == 1:
                        FORGED[name](values["shard_random"])
                    take_values(values)

                return load(*arguments, take_values=forge_and_take, **options)

            io.load = load_and_forge
            state["note"] = "still mine"
            tensors = [tensor.clone() for tensor in live()]
            before = generator_states(torch.device("cpu"))
            try:
                strategy.load_checkpoint(path, state)
            except Exception as error:  # noqa: BLE001 - handed to the test, which looks at it
                said[name] = (type(error).__name__, str(error), state["note"])
            after = generator_states(torch.device("cpu"))
            assert all(torch.equal(after[key], before[key]) for key in before), name
            assert all(torch.equal(here, there) for here, there in zip(live(), tensors, strict=True)), name
    return said


def test_what_is_no_state_of_generators_is_refused_on_every_rank_before_any_is_touched(worlds, tmp_path):
    for size in (1, 2):
        for said in worlds(size).run(load_forged, tmp_path / str(size), tuple(FORGED)):
            assert said.keys() == FORGED.keys()
            for name, (kind, sentence, note) in said.items():
                assert kind == "CheckpointCorrupted", (name, sentence)
                assert "does not say where the random number generators stood: " in sentence
                assert note == "still mine"


def test_states_at_the_edge_of_what_generators_have_are_taken_up():
    for position in (0, 1, 623, 624):
        states = generator_states(torch.device("cpu"))
        states["numpy"][-2] = states["python"][-2] = position
        check_generator_states(states, torch.device("cpu"))
        before = generator_states(torch.device("cpu"))
        set_generator_states(states, torch.device("cpu"))
        drawn()
        set_generator_states(before, torch.device("cpu"))


class _CudaGenerator:
    """Stands in for the generator of a CUDA device, which torch for CPUs alone has not."""

    def __init__(self, monkeypatch, device):
        self.device, self.generator, self.seeds = device, torch.Generator(), []
        monkeypatch.setattr(torch.cuda, "get_rng_state", self.get_state)
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set_state)
        monkeypatch.setattr(torch.cuda, "manual_seed", self.seeds.append)
        monkeypatch.setattr(torch.cuda, "manual_seed_all", self.seeds.append)  # what torch.manual_seed calls

    def get_state(self, device):
        assert device == self.device
        return self.generator.get_state()

    def set_state(self, state, device):
        assert device == self.device
        self.generator.set_state(state)


@pytest.fixture
def cuda(monkeypatch):
    return _CudaGenerator(monkeypatch, torch.device("cuda", 3))


def test_the_generator_of_a_cuda_device_is_kept_too(cuda):
    states = generator_states(cuda.device)
    expected = torch.rand((), generator=cuda.generator)
    set_generator_states(states, cuda.device)
    assert torch.rand((), generator=cuda.generator) == expected
    assert cuda.seeds == []


def test_after_a_load_from_a_cpu_a_cuda_device_draws_what_follows_from_it(cuda):
    states = generator_states(torch.device("cpu"))
    for _ in range(2):
        set_generator_states(states, cuda.device)
    torch.rand(())
    set_generator_states(generator_states(torch.device("cpu")), cuda.device)
    first, again, later = cuda.seeds
    assert first == again != later


def test_seeds_reach_cuda_devices(cuda):
    seed_everything(7)
    assert cuda.seeds == [7]
