"""The operations of random programs that save, load or fail to; ``operations`` has all of them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Save:
    """Save a checkpoint of all modules, optimizers and schedulers; ``blocking=False`` goes on meanwhile.

    Attributes:
        blocking: Whether it is complete before the program goes on.
        frozen: Whether parameters are in it that were frozen at setup and still are.
    """

    blocking: bool = True
    frozen: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Load the last checkpoint, by its path or as the ``"latest"`` of its folder, or its ``"modules"`` alone."""

    how: str = "path"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fail:
    """Try what has to fail by one of our errors, and change nothing: on all ranks, or the program ends as a defect.

    Attributes:
        how: ``"save"``, where a file is in the way; ``"background"``: a save that others go on beside; ``"unwaited"``:
            the save after one in the background that nobody waits for; ``"load"`` of a value that the last checkpoint
            lacks; ``"object"``: a load of the last checkpoint, of which one rank's object takes nothing; ``"set up"``:
            a module again; ``"foreign"``: to step an optimizer that was not; ``"form"``: to save in one that is none;
            ``"axis"``: to reduce over ranks that nobody has named so; ``"layer"``: to call one outside of its module's
            forward, where a strategy does not promise that; ``"steps"``: to step, without gradients, for as long as a
            save in the background takes to fail, which all ranks have to hear of before the same step;
            ``"step"``, ``"norm"``, ``"value"``, ``"gradients"``: to step with an optimizer's gradients, to clip or look
            at them while some wait for a backward outside of ``no_backward_sync``.
        optimizer: Whose gradients wait, or are zeroed for steps without.
    """

    how: str = "save"
    optimizer: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavePretrained:
    """Write a module's weights by its own ``save_pretrained``."""

    module: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadWeights:
    """Fill a module with the weights that its ``save_pretrained`` has written last."""

    module: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switch:
    """Save, end the strategy, and go on under another one, or the same anew.

    Attributes:
        strategy: Which.
        world_size: On how many ranks, where these are not as many as before.
        same: Whether the strategy's object is set up again, instead of another made.
        resumed: Whether nothing is saved, and what goes on is the last checkpoint, as after a run that was ended.
        blocking: Whether the save is complete before the strategy is told to end, which waits for it anyway.
    """

    strategy: str
    world_size: int = 0
    same: bool = False
    resumed: bool = False
    blocking: bool = True
