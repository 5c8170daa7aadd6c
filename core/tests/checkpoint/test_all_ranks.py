"""What one rank cannot do all ranks learn of, though it is interrupted."""

from __future__ import annotations

import pytest
from fixtures.thread_ranks import on_ranks

from shard_core.checkpoint.all_ranks import on_all_ranks
from shard_core.errors import CheckpointError


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_rank_that_is_interrupted_says_so_before_it_goes(kind):
    def interrupted(coordinator):
        def phase():
            if coordinator.rank == 1:
                raise kind("by hand")

        try:
            return on_all_ranks(coordinator, "saving", phase)
        except kind as error:
            return f"left by {type(error).__name__}"

    other, interrupted_one = on_ranks(2, interrupted)
    assert isinstance(other, CheckpointError)
    assert str(other) == f"saving failed on 1 of 2 ranks: rank 1: {kind.__name__}: by hand"
    assert interrupted_one == f"left by {kind.__name__}"
