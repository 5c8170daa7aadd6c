"""Embeddings made with ``sparse=True`` under engines that send dense gradients alone."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from shard_core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shard_core.parameters import ParameterNames

_ALIKE = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.LBFGS)
"""Optimizers that step a gradient with all rows as they step one without those that are zero."""


class DenseEmbeddingGradients:
    """The embeddings of a module that were made with ``sparse=True``, and have gradients with all rows while set up.

    What sparse gradients lack are rows of zeros, so sums, norms and clipped values are alike. Torch's optimizers either
    step both alike, or raise at sparse ones, or, as ``SparseAdam``, step something else.

    Args:
        module: The user's, before setup.
        names: The names its parameters have.
    """

    def __init__(self, module: nn.Module, names: ParameterNames) -> None:
        found = (part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse)
        self._layers: list[nn.Embedding | nn.EmbeddingBag] = list(found)
        # A weight that other layers use has a dense gradient in plain PyTorch, too: the sum of sparse and dense ones.
        mine = [each for layer in self._layers for each in layer.parameters(recurse=False)]
        uses = [each for part in module.modules() for each in part.parameters(recurse=False)]
        self._names = {names.of(each) for each in mine if _count(each, uses) == _count(each, mine)}

    @property
    def found(self) -> bool:
        """Whether there are any."""
        return bool(self._layers)

    @contextlib.contextmanager
    def made_dense(self) -> Iterator[None]:
        """Compute gradients with all rows from here on; if what is done inside fails, restore the layers."""
        for layer in self._layers:
            layer.sparse = False
        try:
            yield
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Restore the layers: they compute sparse gradients again."""
        for layer in self._layers:
            layer.sparse = True

    def check(
        self, optimizer: torch.optim.Optimizer, name_of: Callable[[torch.Tensor], str | None], strategy: str
    ) -> None:
        """Check that an optimizer steps gradients with all rows as plain PyTorch steps sparse ones.

        Args:
            optimizer: Over parameters of the module.
            name_of: Returns the first name of what it holds; None for what is not the module's.
            strategy: Whose engine sends dense gradients alone.

        Raises:
            SetupError: Naming the optimizer, and the parameter.
        """
        for group in optimizer.param_groups if self._names else ():
            if _steps_alike(optimizer, group):
                continue
            names = (name_of(parameter) for parameter in group["params"] if parameter.requires_grad)
            name = next((each for each in names if each in self._names), None)
            if name is not None:
                raise SetupError(
                    f"the embedding of {name!r} was made with sparse=True, and strategy {strategy!r} computes its "
                    f"gradient with all rows, which this {type(optimizer).__name__} is not known to step as it would a "
                    "sparse one; take SGD or Adagrad without weight decay (Adagrad with eps above 0), or LBFGS, or "
                    "make the embedding without sparse=True."
                )

    def make_state_dense(self, optimizer: torch.optim.Optimizer) -> None:
        """Add rows of zeros to what an optimizer has kept of sparse gradients, such as SGD's momentum.

        Args:
            optimizer: Over parameters of the module; what it keeps beside them is left alone.
        """
        for slots in optimizer.state.values() if self._layers else ():
            if isinstance(slots, dict):  # others keep counts there, by names
                slots.update(
                    {slot: each.to_dense() for slot, each in slots.items() if torch.is_tensor(each) and each.is_sparse}
                )


def _count(parameter: torch.Tensor, uses: list[nn.Parameter]) -> int:
    return sum(each is parameter for each in uses)


def _steps_alike(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> bool:
    """Return whether a gradient's zero rows change nothing: Adagrad without ``eps`` would divide zero by zero."""
    return type(optimizer) in _ALIKE and not group.get("weight_decay") and bool(group.get("eps", 1.0))
