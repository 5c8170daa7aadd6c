"""Running variances are those that torch documents, and layers that call torch's own checkpoint compute again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils import checkpoint
from xla_stories import FSDP, SPMD

from shard_core import get_strategy
from shard_xla.strategy.normalization.running_variance import correct_running_variances


class Norms(nn.Module):
    """One of each kind: the second a plain mean of all batches, the third of instances."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(4)
        self.second = nn.BatchNorm1d(4, momentum=None)
        self.third = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.third(self.second(self.first(inputs)))
        return out


class Masked(nn.Module):
    """A layer with dropout that is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1000))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint.checkpoint(self._masked, inputs, use_reentrant=False)
        return out

    def _masked(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.scale.square() * inputs, 0.5)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(3, 4, 5, generator=generator) for _ in range(3)]


def forwards(name: str) -> dict[str, torch.Tensor]:
    with get_strategy(name) as strategy:
        model = Norms()
        model, _ = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.0)])
        for inputs in batches():
            strategy.backward(model(strategy.batch_to_device(inputs)).square().mean(), model)
        model.eval()
        model(strategy.batch_to_device(batches()[0]))
        return strategy.module_state_dict(model)


def masks(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    with get_strategy(name) as strategy:
        strategy.seed_everything(3)
        model = Masked()
        model, _ = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=1.0)])
        output = model(strategy.batch_to_device(torch.ones(1000)))
        strategy.backward(output.sum(), model)
        gradient = strategy.broadcast(strategy.module_gradients(model))["scale"]
        return output.detach().cpu(), gradient


@pytest.mark.parametrize(("name", "size", "environment"), [FSDP, SPMD], ids=["xla_fsdp", "xla_spmd"])
def test_running_variances_are_of_unbiased_variances(worlds, name, size, environment):
    plain = Norms()
    for inputs in batches():
        plain(inputs)
    shown = worlds(size, environment).run(forwards, name)[0]
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(shown[key], value, msg=lambda text, key=key: f"{key}: {text}")


def test_layers_brought_back_to_the_host_are_torchs_own():
    model, plain = Norms(), Norms()
    correct_running_variances(model)
    for inputs in batches():
        model(inputs)
        plain(inputs)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize(("name", "size", "environment"), [FSDP, SPMD], ids=["xla_fsdp", "xla_spmd"])
def test_torchs_checkpoint_repeats_dropout(worlds, name, size, environment):
    answers = worlds(size, environment).run(masks, name)
    kept = torch.stack([output for output, _ in answers])
    assert 0.4 < (kept > 0).float().mean() < 0.6
    # Where every rank dropped an element, or none did, its gradient shows that the masks of backward were the same.
    torch.testing.assert_close(answers[0][1], kept.mean(0) * 2)
