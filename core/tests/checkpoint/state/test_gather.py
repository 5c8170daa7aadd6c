"""Whole tensors are gathered in few exchanges, and what is sent is no more than what is held."""

from __future__ import annotations

import pickle

import torch
from fixtures.bits import assert_same_bits
from fixtures.thread_ranks import all_ranks, on_ranks
from torch import nn

from shard_core.checkpoint.state import gather
from shard_core.checkpoint.state.gather import full_tensors
from shard_core.checkpoint.state.shard import FlatPart
from shard_core.checkpoint.state.tensor_state import TensorState


class _Weighed:
    """Ranks whose messages are measured."""

    def __init__(self, coordinator):
        self._inner = coordinator
        self.bytes = []

    def gather_objects(self, value):
        self.bytes.append(len(pickle.dumps(value)))
        return self._inner.gather_objects(value)


def _gathered(model, coordinator):
    """Gather a model of which two ranks hold half each, as ranges of one long tensor."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    starts = dict(zip(model.parameters(), _starts(model), strict=True))

    def half(tensor):
        size = tensor.numel() // 2
        start = coordinator.rank * size
        values = flat[starts[tensor] + start : starts[tensor] + start + size]
        return FlatPart(shape=tuple(tensor.shape), start=start, values=values)

    state = TensorState({"model": model}, {}, rank=coordinator.rank, world_size=2, flat_part=half)
    weighed = _Weighed(coordinator)
    return dict(full_tensors(state, weighed)), weighed.bytes


def _starts(model):
    start = 0
    for parameter in model.parameters():
        yield start
        start += parameter.numel()


def _model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(30)))


def _weights(model):
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def test_small_tensors_share_an_exchange_and_take_along_only_themselves():
    model = _model()
    for whole, sizes in all_ranks(2, lambda coordinator: _gathered(model, coordinator)):
        assert_same_bits(whole, _weights(model))
        assert len(sizes) == 2  # of the layouts, then of everything
        held = sum(parameter.nbytes for parameter in model.parameters()) // 2
        assert held < sizes[1] < 3 * held


def test_no_exchange_is_larger_than_a_portion(monkeypatch):
    model = _model()
    monkeypatch.setattr(gather, "_BYTES_AT_ONCE", 4 * model[0].weight.nbytes)
    for whole, sizes in all_ranks(2, lambda coordinator: _gathered(model, coordinator)):
        assert_same_bits(whole, _weights(model))
        assert len(sizes) == 1 + 8


def test_what_no_rank_holds_is_not_made_up():
    """As under an engine that describes its state as of more ranks than there are."""

    def gathered(coordinator):
        torch.manual_seed(0)
        state = TensorState({"model": nn.Linear(64, 64)}, {}, rank=0, world_size=2)
        return dict(full_tensors(state, coordinator))

    (error,) = on_ranks(1, gathered)
    assert str(error).startswith("ranks hold 0 of the 64 elements of 'model.bias', each to be counted once; ")
