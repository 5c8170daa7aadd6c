"""Noticing that every step is compiled anew: with XLA that is the usual reason for a crawling run."""

from __future__ import annotations

import warnings


class RecompilationWatch:
    """Counts steps that compiled something, and warns when there is no end to them.

    Args:
        patience: After how many such steps in a row to warn, and twice as many before the next warning.
    """

    def __init__(self, patience: int = 8) -> None:
        self._patience = patience
        self._compiled = compiled_graphs()
        self._in_a_row = 0

    def step(self) -> None:
        """Count a step."""
        compiled, before = compiled_graphs(), self._compiled
        self._compiled = compiled
        self._in_a_row = self._in_a_row + 1 if compiled > before else 0
        if self._in_a_row < self._patience:
            return
        warnings.warn(
            f"the last {self._in_a_row} steps each compiled new graphs, {compiled} so far; XLA compiles for every new "
            "shape and for what is read in the middle of a step: give all batches one shape (drop_last=True, padding), "
            "and look at losses after optimizer_step() only.",
            stacklevel=4,
        )
        self._patience *= 2
        self._in_a_row = 0


def compiled_graphs() -> int:
    """Count the graphs this process has compiled."""
    from torch_xla.debug import metrics

    data = metrics.metric_data("CompileTime")
    return 0 if data is None else int(data[0])
