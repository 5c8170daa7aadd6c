"""The whole kit in one class: whoever inherits from it holds a strategy to every promise."""

from __future__ import annotations

from typing import Any

from shard_core.testing.rules import check_author
from shard_core.testing.suites.checkpoint.async_save import AsyncSave
from shard_core.testing.suites.checkpoint.mismatch import Mismatch
from shard_core.testing.suites.checkpoint.resharding import Resharding
from shard_core.testing.suites.checkpoint.resume import Resume
from shard_core.testing.suites.checkpoint.round_trip import RoundTrip
from shard_core.testing.suites.checkpoint.safety import Safety
from shard_core.testing.suites.checkpoint.state_dicts import StateDicts
from shard_core.testing.suites.checkpoint.weights import Weights
from shard_core.testing.suites.collectives.synchronization import Synchronization
from shard_core.testing.suites.collectives.tensors import Tensors
from shard_core.testing.suites.launcher import Launching
from shard_core.testing.suites.plugin.construction import Construction
from shard_core.testing.suites.plugin.metadata import Metadata
from shard_core.testing.suites.plugin.teardown import Teardown
from shard_core.testing.suites.training.accumulation import Accumulation
from shard_core.testing.suites.training.averages import Averages
from shard_core.testing.suites.training.capabilities import Capabilities
from shard_core.testing.suites.training.clipping import Clipping
from shard_core.testing.suites.training.data import Data
from shard_core.testing.suites.training.float16 import Float16
from shard_core.testing.suites.training.gradients import Shown
from shard_core.testing.suites.training.optimizers import Optimizers
from shard_core.testing.suites.training.orders import Orders
from shard_core.testing.suites.training.parity import Parity
from shard_core.testing.suites.training.precision import Precisions
from shard_core.testing.suites.training.randomness import Randomness
from shard_core.testing.suites.training.replicas import Replicas
from shard_core.testing.suites.training.setup import Setup
from shard_core.testing.suites.training.structure import Structure
from shard_core.testing.suites.training.surroundings import CustomSteps, Surroundings


# Pytest runs the tests of the last base first.
class Conformance(
    Launching,
    Teardown,
    CustomSteps,
    Surroundings,
    AsyncSave,
    Safety,
    Weights,
    Mismatch,
    StateDicts,
    Resharding,
    Averages,
    Resume,
    RoundTrip,
    Synchronization,
    Tensors,
    Data,
    Capabilities,
    Optimizers,
    Float16,
    Precisions,
    Orders,
    Shown,
    Clipping,
    Accumulation,
    Replicas,
    Structure,
    Parity,
    Setup,
    Randomness,
    Construction,
    Metadata,
):
    """Holds a strategy to every promise of the contract.

    Example:
        This is a whole test file; ``pytest`` runs it, on a laptop as in CI::

            from shard_core.testing import Conformance


            class TestMirror(Conformance):
                strategy = "mirror"
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check that the author sets nothing but what is theirs.

        Raises:
            RuleBroken: If a promise is removed, replaced or excused without a reason.
        """
        super().__init_subclass__(**kwargs)
        check_author(cls, Conformance)
