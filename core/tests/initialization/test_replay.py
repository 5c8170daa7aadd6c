"""Replayed values are bit for bit those of a plain build, whatever the constructor does without looking at values."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from shard_core.initialization.recording import record


class Written(nn.Module):
    """A user's constructor that writes by every road there is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 5))
        self.bias = nn.Parameter(torch.Tensor(6))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        with torch.no_grad():
            self.weight.normal_(0, 0.02)
            self.weight[2] = 0
            self.weight[:, 1:3].uniform_(-1, 1)
            self.weight.t()[0].mul_(3)
            self.bias.copy_(torch.linspace(0, 1, 6))
        self.frozen.data = torch.rand(4)
        self.frozen.data[1:].div_(self.weight.data.abs().sum())
        self.weight.data.clamp_(min=-0.5)
        self.weight.data[self.weight.data > 0.4] = math.pi


class Buffered(nn.Module):
    """Buffers of every kind."""

    def __init__(self):
        super().__init__()
        made = {
            "scalar": torch.tensor(3),
            "nothing": torch.empty(0),
            "flags": torch.ones(3, dtype=torch.bool).logical_not(),
            "integers": torch.arange(5, dtype=torch.int8),
            "mask": torch.tril(torch.ones(4, 4)),
            "from_list": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
            "from_numpy": torch.from_numpy(np.arange(4.0)) * torch.randn(4),
            "complex": torch.polar(torch.ones(3), torch.arange(3.0)).conj(),
            "imaginary": torch.polar(torch.ones(3), torch.randn(3)).conj().imag,
            "strided": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "cumulated": torch.cumsum(torch.randn(4, 5).t(), 0),
            "decomposed": torch.linalg.qr(torch.randn(5, 4))[0],
            "singular": torch.linalg.svd(torch.randn(5, 4))[2],
            "sorted": torch.randn(4, 5).sort(dim=0)[1],
            "permuted": torch.randperm(9),
            "dropped": nn.functional.dropout(torch.ones(8, 8), 0.5),
            "resized": torch.rand(8).resize_(4),
            "adopted": torch.empty(0).set_(torch.rand(6)),
            "transposed": torch.rand(2, 3).t_().contiguous(),
            "sampled": torch.distributions.Dirichlet(torch.ones(4)).sample(),
            "sixteen": torch.randn(7).half(),
        }
        for number, (name, value) in enumerate(made.items()):
            self.register_buffer(name, value, persistent=number % 2 == 0)
        whole = torch.randn(4, 4)
        self.register_buffer("whole", whole)
        self.register_buffer("part", whole[1:3])
        self.part.fill_(2.0)


class Seeded(nn.Module):
    """A constructor that seeds, forks and restores generators."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        state = torch.get_rng_state()
        self.second = nn.Linear(4, 4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.forked = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)
        torch.set_rng_state(state)
        self.like_second = nn.Linear(4, 4)
        own = torch.Generator().manual_seed(5)
        self.own = nn.Parameter(torch.randn(4, generator=own))
        self.own_next = nn.Parameter(torch.empty(4).normal_(generator=own))
        self.trunc = nn.init.trunc_normal_(nn.Parameter(torch.empty(9)), generator=own)
        torch.manual_seed(11)
        self.last = nn.Linear(4, 4)


class ReadBeforeChanged(nn.Module):
    """A constructor that reads a tensor and then changes it in place."""

    def __init__(self):
        super().__init__()
        table = torch.zeros(4)
        self.register_buffer("noisy", table + torch.rand(4))
        table[1:] += 1
        self.register_buffer("noisier", table * torch.rand(4))
        self.register_buffer("table", table.add_(1))


class DefaultDtype(nn.Module):
    """A constructor that changes torch's default dtype for a while."""

    def __init__(self):
        super().__init__()
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        self.wide = nn.Linear(3, 3)
        self.register_buffer("steps", torch.arange(3) / 2)
        torch.set_default_dtype(usual)
        self.usual = nn.Linear(3, 3)


def initialised(initialise, layer):
    def make():
        module = layer()
        initialise(module.weight)
        return module

    return make


def scaled_afterwards():
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    with torch.no_grad():
        for depth, parameter in enumerate(module.parameters()):
            parameter.div_(math.sqrt(depth + 1))
    return module


def tied():
    module = nn.ModuleDict({"embed": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
    module["head"].weight = module["embed"].weight
    return module


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)


MODULES = {
    "linear": lambda: nn.Linear(5, 7),
    "convolution and batch norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
    "lstm": lambda: nn.LSTM(3, 4, 2),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "deepcopied encoder": encoder,
    "written": Written,
    "buffered": Buffered,
    "seeded": Seeded,
    "read before changed": ReadBeforeChanged,
    "default dtype": DefaultDtype,
    "scaled afterwards": scaled_afterwards,
    "tied": tied,
    "bfloat16": lambda: encoder().to(torch.bfloat16),
    "trunc_normal_": initialised(lambda w: nn.init.trunc_normal_(w, std=0.02), lambda: nn.Linear(40, 40)),
    "trunc_normal_ far": initialised(lambda w: nn.init.trunc_normal_(w, 0, 1, 1.5, 2), lambda: nn.Linear(20, 20)),
    "trunc_normal_ part": initialised(lambda w: nn.init.trunc_normal_(w[2:4]), lambda: nn.Linear(40, 40)),
    "orthogonal_": initialised(nn.init.orthogonal_, lambda: nn.Linear(6, 9)),
    "sparse_": initialised(lambda w: nn.init.sparse_(w, 0.3), lambda: nn.Linear(6, 9)),
    "dirac_": initialised(nn.init.dirac_, lambda: nn.Conv1d(4, 6, 3)),
    "eye_": initialised(nn.init.eye_, lambda: nn.Linear(6, 9)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)),
}


@pytest.mark.parametrize("seed", [0, 7, 12345])
@pytest.mark.parametrize("name", MODULES)
def test_values_are_those_of_a_plain_build(built, name, seed):
    built(MODULES[name], seed=seed).check()


def test_the_comparison_would_notice_other_numbers(built):
    builds = built(MODULES["linear"])
    other = built(MODULES["linear"], seed=8)
    builds.delivered = other.delivered
    assert builds.wrong == ["weight", "bias"]


def test_one_draw_too_many_would_be_noticed(built):
    calls = []

    def make():
        # The second build, the recorded one, draws a number that the plain one does not.
        if calls:
            torch.rand(1)
        calls.append(None)
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    assert built(make).wrong == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_each_name_is_delivered_once_and_ties_share_values(built):
    builds = built(tied)
    assert sorted(builds.deliveries) == ["embed.weight", "head.weight"]
    assert torch.equal(builds.delivered["embed.weight"], builds.delivered["head.weight"])


def test_views_of_one_storage_are_delivered_over_one_storage():
    with record() as recording:
        whole = torch.randn(4)
        part = whole[1:]
    values = {}
    recording.replay({"whole": whole, "part": part}, values.__setitem__)
    values["part"].zero_()
    assert values["whole"][1:].tolist() == [0, 0, 0]
    assert values["whole"][0] != 0


def test_memory_that_nobody_filled_is_zero():
    with record() as recording:
        parameter = nn.Parameter(torch.empty(3))
        partly = torch.empty(4)
        partly[1] = 5
    values = {}
    recording.replay({"parameter": parameter, "partly": partly}, values.__setitem__)
    assert values["parameter"].tolist() == [0, 0, 0]
    assert values["partly"].tolist() == [0, 5, 0, 0]


def test_a_constant_is_taken_as_it_was_when_it_was_read():
    constant = torch.ones(3)
    with record() as recording:
        module = nn.Linear(3, 1)
        module.weight.data.copy_(constant)
    constant.fill_(9)
    values = {}
    recording.replay({"weight": module.weight}, values.__setitem__)
    values["weight"].fill_(4)
    again = {}
    recording.replay({"weight": module.weight}, again.__setitem__)
    assert again["weight"].tolist() == [[1, 1, 1]]


def test_a_second_replay_gives_the_same_values():
    with record() as recording:
        counter = torch.tensor([1.0, 2.0])
        counter.add_(torch.rand(2))
    values = []
    for _ in range(2):
        recording.replay({"counter": counter}, lambda name, value: values.append(value.clone()))
    assert torch.equal(*values)


def test_whoever_receives_values_may_draw_numbers(built):
    torch.manual_seed(0)
    plain = [nn.Linear(3, 3).weight.detach().clone() for _ in range(3)]
    torch.manual_seed(0)
    with record() as recording:
        layers = [nn.Linear(3, 3) for _ in range(3)]
    values = {}

    def deliver(name, value):
        torch.rand(5)
        values[name] = value

    recording.replay({str(k): layer.weight for k, layer in enumerate(layers)}, deliver)
    assert all(torch.equal(values[str(k)], value) for k, value in enumerate(plain))


def blocks(width=32, depth=12):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def leave(module):
    pass


def scale(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)


def widen(module):
    module.to(torch.float64)


def copied(module):
    return {f"copy.{name}": parameter for name, parameter in copy.deepcopy(module).named_parameters()}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("then", "share"), [(leave, 1), (scale, 1), (widen, 1.5), (copied, 2)], ids=["built", "scaled", "widened", "copied"]
)
def test_only_the_largest_tensor_lives_at_a_time(built, then, share):
    builds = built(blocks, then)
    builds.check()
    largest = max(value.numel() * value.element_size() for value in builds.plain.values())
    assert builds.recording.peak_bytes <= share * largest
