from __future__ import annotations

import pytest
import torch

from shard_core.testing import models


def _total_loss_and_gradients(model, parts, reduction):
    model.zero_grad()
    loss = sum(model(*part, reduction=reduction) for part in parts)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("parts", [2, 3])
def test_the_average_over_equal_shares_is_the_global_mean(name, parts):
    torch.manual_seed(0)
    model = models.make(name).double()
    (batch,) = _double(models.batches(name, 1, 12))
    loss, gradients = _total_loss_and_gradients(model, [batch], "mean")
    shares = [models.share(batch, rank, parts) for rank in range(parts)]
    shared_loss, shared_gradients = _total_loss_and_gradients(model, shares, "mean")
    torch.testing.assert_close(shared_loss / parts, loss)
    torch.testing.assert_close([g / parts for g in shared_gradients], gradients)


@pytest.mark.parametrize("name", models.NAMES)
def test_the_sum_over_ragged_shares_by_the_number_of_targets_is_the_global_mean(name):
    torch.manual_seed(0)
    model = models.make(name).double()
    (batch,) = _double(models.batches(name, 1, 12))
    loss, gradients = _total_loss_and_gradients(model, [batch], "mean")
    ragged = [tuple(tensor[:5] for tensor in batch), tuple(tensor[5:] for tensor in batch)]
    summed_loss, summed_gradients = _total_loss_and_gradients(model, ragged, "sum")
    count = batch[1].numel()
    torch.testing.assert_close(summed_loss / count, loss)
    torch.testing.assert_close([g / count for g in summed_gradients], gradients)


def _double(batches):
    return [tuple(t.double() if t.is_floating_point() else t for t in batch) for batch in batches]


@pytest.mark.parametrize("name", models.NAMES)
def test_weights_follow_the_seed_and_batches_theirs(name):
    torch.manual_seed(3)
    first = models.make(name).state_dict()
    torch.manual_seed(3)
    second = models.make(name).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    drawn, again, other = (models.batches(name, 2, 4, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for x, y in zip(drawn, again, strict=True) for a, b in zip(x, y, strict=True))
    assert not torch.equal(drawn[0][0], other[0][0])
    assert not torch.equal(drawn[0][0], drawn[1][0])


@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("optimizer", models.OPTIMIZERS)
def test_every_trained_parameter_is_in_one_group_and_every_model_learns(name, optimizer):
    torch.manual_seed(0)
    model = models.make(name)
    stepped = models.make_optimizer(optimizer, model)
    held = [p for group in stepped.param_groups for p in group["params"]]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(held) == len({id(p) for p in held}) == len(trained)
    assert all(group["params"] for group in stepped.param_groups)
    batch = models.batches(name, 1, 12)[0]
    before = model(*batch).item()
    for _ in range(10):
        model(*batch).backward()
        stepped.step()
        stepped.zero_grad()
    assert model(*batch).item() < before


def test_frozen_unused_and_buffers_are_what_they_say():
    frozen, unused, buffers = (models.make(name) for name in ("frozen", "unused", "buffers"))
    for model in (frozen, unused, buffers):
        model(*models.batches("plain", 1, 4)[0]).backward()
    assert frozen.first.weight.grad is None
    assert not frozen.first.weight.requires_grad
    assert unused.unused.weight.grad is None
    assert unused.unused.weight.requires_grad
    assert buffers.calls == 1
    assert "shift" not in buffers.state_dict()


def test_uneven_shapes_do_not_divide():
    sizes = [parameter.shape[0] for parameter in models.make("uneven").parameters()]
    assert sorted(set(sizes)) == [1, 3, 5, 7]
    assert models.make("scalar").temperature.shape == ()


def test_unknown_names_get_the_nearest():
    with pytest.raises(KeyError, match="did you mean 'frozen'"):
        models.make("frosen")
    with pytest.raises(KeyError, match="did you mean 'adamw'"):
        models.make_optimizer("adam", models.make("plain"))
