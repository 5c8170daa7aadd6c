"""Embeddings made with ``sparse=True``, whose gradients XLA computes with all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from shard_core import SetupError
from shard_core.backend import plain_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    Optimizers = Sequence[torch.optim.Optimizer]

_ALIKE = (torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers that step a gradient with all rows as they step one without those that are zero."""


class FormerlySparse:
    """The embeddings of a module that were made with ``sparse=True``; from now on their gradients have all rows.

    XLA has no sparse tensors (torch_xla 2.9.0: "Could not run 'aten::_sparse_coo_tensor_with_dims_and_tensors' with
    arguments from the 'SparseXLA' backend"); of ``EmbeddingBag`` it computes gradients with all rows by itself.

    Args:
        module: The user's, before setup.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers: dict[str, nn.Embedding | nn.EmbeddingBag] = {}
        for name, part in module.named_modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
                part.sparse = False
                self._layers[plain_name(f"{name}.weight".removeprefix("."))] = part

    def check(self, optimizers: Optimizers) -> None:
        """Check that optimizers step gradients with all rows as plain PyTorch steps sparse ones.

        Where it steps none it raises, and ``SparseAdam`` leaves moments alone of rows that are not there.

        Args:
            optimizers: Over the module's parameters as they are now.

        Raises:
            SetupError: Naming the optimizer, and the parameter.
        """
        weights = {id(_registered(layer)): name for name, layer in self._layers.items()}
        for optimizer in optimizers if weights else ():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in weights and parameter.requires_grad and not _steps_alike(optimizer, group):
                        raise SetupError(
                            f"the embedding of {weights[id(parameter)]!r} was made with sparse=True, and XLA computes "
                            f"gradients with all rows, which this {type(optimizer).__name__} is not known to step as "
                            "it would sparse ones; take SGD or Adagrad without weight decay (Adagrad with eps above "
                            "0), or make the embedding without sparse=True."
                        )


def _registered(layer: nn.Module) -> torch.Tensor:
    """Return the weight that optimizers step; an attribute may be another, which computes."""
    return dict(layer.named_parameters(recurse=False))["weight"]


def _steps_alike(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> bool:
    """Return whether a gradient's zero rows change nothing: Adagrad without ``eps`` would divide zero by zero."""
    return type(optimizer) in _ALIKE and not group["weight_decay"] and bool(group.get("eps", 1.0))
