"""What belongs to a recording, and where it leaves the generators."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shard_core.errors import CannotReplay
from shard_core.initialization.recording import is_recorded, record, recording_of


def layers():
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def rewrite(module):
    module[0].weight.data.zero_()
    module[1].weight.data.normal_()
    nn.init.orthogonal_(module[2].weight)
    module[3].weight.data[3:5] = 2.0


def tie(module):
    module[0].weight = module[1].weight


def tie_and_convert(module):
    tie(module)
    module.to(torch.bfloat16)


def scale_by_vector(module):
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector * 2, module.parameters())


def halve(module):
    module.half()


def widen(module):
    module.double()


def seed_and_draw(module):
    torch.manual_seed(99)
    nn.init.normal_(module[2].weight)


def load(module):
    module.load_state_dict({name: torch.full(value.shape, 2.5) for name, value in module.state_dict().items()})


def take_average(module):
    return {f"average.{name}": p for name, p in copy.deepcopy(module).named_parameters()}


def make_adagrad(module):
    optimizer = torch.optim.Adagrad(module.parameters(), initial_accumulator_value=0.1)
    return {f"{k}.{slot}": v for k, state in enumerate(optimizer.state.values()) for slot, v in state.items()}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    "then",
    [
        rewrite,
        tie,
        tie_and_convert,
        scale_by_vector,
        seed_and_draw,
        load,
        take_average,
        make_adagrad,
        halve,
        widen,
    ],
    ids=lambda then: then.__name__,
)
def test_what_happens_between_constructor_and_setup_counts(built, then):
    built(layers, then).check()


def test_conversion_keeps_parameters_and_ties_what_they_are():
    with record():
        module = layers()
        tie(module)
    optimizer = torch.optim.AdamW(module.parameters())
    before = module[0].weight
    module.to(torch.bfloat16)
    assert module[0].weight is before
    assert module[1].weight is before
    assert optimizer.param_groups[0]["params"][0] is before
    assert isinstance(before, nn.Parameter)
    assert before.dtype is torch.bfloat16


def test_recorded_tensors_have_a_shape_and_no_value():
    with record() as recording:
        module = nn.Linear(10**6, 10**6)
    assert is_recorded(module.weight)
    assert recording_of(module.weight) is recording
    assert module.weight.device.type == "cpu"
    assert module.weight.shape == (10**6, 10**6)
    assert not is_recorded(nn.Linear(1, 1).weight)
    assert not is_recorded("weight")


def test_a_tensor_with_values_is_handed_out_as_it_is():
    real = nn.Parameter(torch.randn(3))
    with record() as recording:
        module = nn.Linear(3, 3)
        module.bias = real
    values = {}
    recording.replay(dict(module.named_parameters()), values.__setitem__)
    assert torch.equal(values["bias"], real)


def test_recording_draws_nothing_and_replay_draws_what_a_plain_build_draws():
    torch.manual_seed(0)
    layers()
    after_plain = torch.get_rng_state()
    torch.manual_seed(0)
    with record() as recording:
        module = layers()
    between = torch.get_rng_state()
    recording.replay(dict(module.named_parameters()), lambda name, value: None)
    assert torch.equal(torch.get_rng_state(), after_plain)
    assert not torch.equal(between, after_plain)


def test_numbers_between_are_reproducible_and_not_those_of_the_weights():
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        with record():
            nn.Linear(50, 50)
        drawn.append(torch.rand(50))
    torch.manual_seed(0)
    assert torch.equal(*drawn)
    assert set(drawn[0].tolist()).isdisjoint(torch.rand(10_000).tolist())


def test_a_generator_that_was_moved_stays_where_it_is():
    torch.manual_seed(0)
    with record() as recording:
        module = layers()
    torch.manual_seed(5)
    recording.replay(dict(module.named_parameters()), lambda name, value: None)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_a_build_without_random_numbers_leaves_the_generator_alone():
    state = torch.get_rng_state()
    with record():
        nn.LayerNorm(4)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_of_the_user_goes_on_as_after_a_plain_build():
    plain, recorded = (torch.Generator().manual_seed(3) for _ in range(2))
    want = torch.randn(4, generator=plain)
    with record() as recording:
        got = torch.randn(4, generator=recorded)
    values = {}
    recording.replay({"got": got}, values.__setitem__)
    assert torch.equal(values["got"], want)
    assert torch.equal(torch.rand(2, generator=recorded), torch.rand(2, generator=plain))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_second_block_goes_on_where_the_first_ended():
    def second(first):
        module = nn.Linear(3, 3)
        module.weight.data.add_(first.weight.data)
        return nn.ModuleList([module, copy.deepcopy(first)])

    torch.manual_seed(0)
    first = nn.Linear(3, 3)
    want = [dict(first.named_parameters()), dict(second(first).named_parameters())]
    after_plain = torch.rand(3)

    torch.manual_seed(0)
    with record() as one:
        first = nn.Linear(3, 3)
    with record(after=one) as two:
        both = second(first)
    assert two is one
    for module, values in zip([first, both], want, strict=True):
        got = {}
        one.replay(dict(module.named_parameters()), got.__setitem__)
        assert all(torch.equal(got[name], value) for name, value in values.items())
    assert torch.equal(torch.rand(3), after_plain)


def test_a_block_after_a_replay_is_a_recording_of_its_own():
    torch.manual_seed(0)
    want = [nn.Linear(3, 3).weight for _ in range(2)]
    torch.manual_seed(0)
    with record() as one:
        first = nn.Linear(3, 3)
    got = {}
    one.replay({"first": first.weight, "bias": first.bias}, got.__setitem__)
    with record(after=one) as two:
        second = nn.Linear(3, 3)
    assert two is not one
    two.replay({"second": second.weight}, got.__setitem__)
    assert torch.equal(got["first"], want[0])
    assert torch.equal(got["second"], want[1])


@pytest.mark.filterwarnings("ignore:.*looks at random values")
def test_tensors_of_two_recordings_may_meet():
    def build(first, second):
        second.weight.data.add_(first.weight.data)
        first.bias.data.copy_(second.bias.data)
        return {"weight": second.weight, "bias": first.bias}

    modules = []
    for seed in range(2):
        torch.manual_seed(seed)
        modules.append(nn.Linear(3, 3))
    want = build(*modules)
    recordings, modules = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        with record() as recording:
            modules.append(nn.Linear(3, 3))
        recordings.append(recording)
    met = build(*modules)
    got = {}
    for name, tensor in met.items():
        recording_of(tensor).replay({name: tensor}, got.__setitem__)
    assert recording_of(met["weight"]) is recordings[1]
    assert recording_of(met["bias"]) is recordings[0]
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_the_replay_of_another_recording_is_refused():
    with record() as one:
        pass
    with record():
        weight = torch.ones(3)
    with pytest.raises(CannotReplay, match="'weight' belongs to another recording"):
        one.replay({"weight": weight}, lambda name, value: None)


def test_a_block_inside_a_block_belongs_to_it():
    with record() as outer, record() as inner:
        weight = torch.ones(3)
    assert inner is outer
    assert recording_of(weight) is outer


def test_an_error_in_a_constructor_ends_the_recording():
    with pytest.raises(RuntimeError, match="dimension"), record():
        nn.Linear(2, -2)
    assert not is_recorded(torch.ones(1))
    assert not is_recorded(nn.init.trunc_normal_(torch.ones(4)))
