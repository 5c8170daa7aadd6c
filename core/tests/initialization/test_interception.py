"""Constructors that look at values get the right ones; what cannot be followed is refused."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from shard_core.errors import CannotReplay
from shard_core.initialization.recording import is_recorded, record

LOOKS = "looks at random values while it is built without them"


class Rejecting(nn.Module):
    """Draws again until no weight is large."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 20))
        with torch.no_grad():
            while (large := self.weight.abs() > 1).any():
                self.weight[large] = torch.randn(int(large.sum()))
        self.after = nn.Linear(4, 4)


class Asking(nn.Module):
    """Turns weights into Python numbers and numpy arrays."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        if self.weight[0, 0] > 0:
            self.extra = nn.Linear(2, 2)
        detached = self.weight.detach()
        made = {
            "item": torch.tensor(detached.norm().item()),
            "list": torch.tensor(detached.tolist()) + 1,
            "numpy": torch.from_numpy(detached.numpy() * 2),
            "array": torch.from_numpy(np.asarray(detached)[0].copy()),
            "nonzero": (detached > 0).nonzero(),
            "selected": detached[detached > 0],
            "unique": torch.unique(torch.randint(0, 9, (20,))),
            "shuffled": torch.tensor(torch.randperm(10).tolist()),
        }
        for name, value in made.items():
            self.register_buffer(name, value)


class Scheduled(nn.Module):
    """Uses numbers that no draw influences, as drop path rates are made."""

    def __init__(self):
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        self.scale = nn.Parameter(torch.tensor(rates) * torch.randn(3))


def ask_for_norm(module):
    return {"norm": torch.tensor(module.weight.norm().item())}


def copy_to_values(module):
    return {"real": torch.ones(6, 5).copy_(module.weight.data)}


def draw_truncated(module):
    nn.init.trunc_normal_(module.weight)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("module", [Rejecting, Asking])
def test_looking_at_random_values_is_right_and_said_once(built, module, seed):
    with pytest.warns(UserWarning, match=LOOKS) as said:
        builds = built(module, seed=seed)
    builds.check()
    warned = [str(warning.message) for warning in said if LOOKS in str(warning.message)]
    assert len(warned) == 1
    assert warned[0].startswith(f"{module.__name__}.__init__ ")


def test_the_warning_names_the_operation(built):
    with pytest.warns(UserWarning, match=r"Rejecting.*aten\._local_scalar_dense|Rejecting.*aten\.is_nonzero"):
        built(Rejecting)


def test_looking_at_values_that_nothing_drew_is_not_worth_a_warning(built):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        builds = built(Scheduled)
    builds.check()


@pytest.mark.filterwarnings(f"ignore:.*{LOOKS}")
def test_orthogonal_parametrization(built):
    built(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(5, 6))).check()


@pytest.mark.filterwarnings(f"ignore:.*{LOOKS}")
@pytest.mark.parametrize("then", [ask_for_norm, copy_to_values, draw_truncated], ids=lambda then: then.__name__)
def test_looking_after_the_block(built, then):
    built(lambda: nn.Linear(5, 6), then).check()


def test_tensors_with_values_stay_what_they_are():
    given = torch.arange(4.0)
    with record():
        doubled = given * 2
        given.add_(1)
        alike = torch.empty_like(given).normal_()
    assert doubled.tolist() == [0, 2, 4, 6]
    assert given.tolist() == [1, 2, 3, 4]
    assert is_recorded(alike)


def test_numbers_drawn_from_tensors_with_values(built):
    given = torch.full((8,), 0.5)

    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("coins", torch.bernoulli(given))
            self.register_buffer("alike", torch.rand_like(given))

    built(Drawing).check()


@pytest.mark.filterwarnings(f"ignore:.*{LOOKS}")
def test_writing_to_a_numpy_view_is_refused():
    with record(), pytest.raises(ValueError, match="read-only"):
        torch.rand(3).numpy()[:] = 1


def test_a_file_read_by_torch_has_its_values(tmp_path):
    torch.save({"weight": torch.ones(3, 3)}, tmp_path / "weights.pt")
    with record():
        weight = nn.Parameter(torch.load(tmp_path / "weights.pt")["weight"])
    assert torch.equal(weight, torch.ones(3, 3))


def test_a_file_read_by_torch_in_another_way_is_refused_and_named(tmp_path):
    torch.save({"weight": torch.ones(3, 3)}, tmp_path / "weights.pt")
    imported_before = torch.load
    with (
        record(),
        pytest.raises(CannotReplay, match=re.escape("no recorded operation filled (was it loaded from a file?)")),
    ):
        nn.Parameter(imported_before(tmp_path / "weights.pt")["weight"])


def test_drawing_into_a_tensor_with_values_is_refused():
    given = torch.zeros(3)
    with record(), pytest.raises(CannotReplay, match=r"aten\.uniform_\.default draws random numbers into a tensor"):
        given.uniform_()


def test_drawing_on_another_device_is_refused():
    with record(), pytest.raises(CannotReplay, match=r"Linear\.__init__, draws random numbers on cuda"):
        nn.Linear(2, 2, device="cuda")


@pytest.mark.filterwarnings("ignore")
def test_sparse_tensors_are_refused():
    with record(), pytest.raises(CannotReplay, match="only dense tensors"):
        torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (2, 2))
    with record() as recording:
        sparse = torch.eye(3).to_sparse()
    with pytest.raises(CannotReplay, match=r"_to_sparse\.default gave a torch\.sparse_coo tensor"):
        recording.replay({"sparse": sparse}, lambda name, value: None)


def test_every_operator_with_a_generator_says_that_it_draws():
    silent = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        found = getattr(getattr(torch.ops, namespace), packet, None) if namespace == "aten" else None
        operator = getattr(found, overload or "default", None)
        if operator is None or all(a.name != "generator" for a in operator._schema.arguments):
            continue
        if torch.Tag.nondeterministic_seeded not in operator.tags:
            silent.append(name)
    assert silent == []
