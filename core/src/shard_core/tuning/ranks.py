"""The trials as the ranks run them, one after the other, each on a model of its own."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shard_core.errors import InvalidOption
from shard_core.parity.batch import part_of, samples_in
from shard_core.tuning.ledger import Measured
from shard_core.tuning.memory import weigh

if TYPE_CHECKING:
    from shard_core.strategy import Strategy
    from shard_core.tuning.experiment import Experiment, Trial


def run_trials(strategy: Strategy, experiment: Experiment, trials: Sequence[Trial]) -> None:
    """Run trials and write down what each comes to.

    Args:
        strategy: Started with the user's own options; keeps the ranks connected from one trial to the next.
        experiment: What trials have alike.
        trials: What they differ in.
    """
    gc.freeze()  # what is there now is nobody's model, and looking through it after each trial takes long
    try:
        for trial in trials:
            _run(strategy, experiment, trial)
    finally:
        gc.unfreeze()


def _run(strategy: Strategy, experiment: Experiment, trial: Trial) -> None:
    if strategy.is_global_zero:
        experiment.ledger.begin(trial.number)
    # Nobody goes ahead: whatever fails from here on is the fault of the trial that was begun last.
    strategy.barrier("begin of a trial")
    measured = _measure(experiment, trial)
    gc.collect()
    if strategy.root_device.type == "cuda":
        torch.cuda.empty_cache()
    strategy.barrier("end of a trial")
    if strategy.is_global_zero:
        experiment.ledger.end(trial.number, measured)


def _measure(experiment: Experiment, trial: Trial) -> Measured:
    recipe = experiment.recipe
    with experiment.make_strategy(trial.setting) as strategy:
        place = strategy.distributed_sampler_kwargs
        rank, data_ranks = place["rank"], place["num_replicas"]
        batch = recipe.batch()
        if samples_in(batch) % data_ranks:
            raise InvalidOption(
                f"the batch has {samples_in(batch)} samples, which do not divide over {data_ranks} data ranks; give a "
                f"batch of a multiple of {data_ranks}, or another number of --devices."
            )
        strategy.seed_everything(recipe.seed)
        model = recipe.model()
        optimizer = recipe.make_optimizer(model)
        module, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        share = strategy.batch_to_device(part_of(batch, rank, data_ranks))

        def step() -> float:
            loss = recipe.loss_of(module, share)
            strategy.backward(loss, module)
            strategy.clip_gradients_norm(module, optimizer, 1.0, error_if_nonfinite=False)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            # Reading a number waits for all the device was given before.
            return float(loss.detach())

        losses = [step() for _ in range(experiment.warm_up)]
        peak = None
        if trial.weighed:
            weighed, peak = weigh(step, strategy.root_device)
            losses += weighed
        seconds = []
        for _ in range(experiment.steps):
            began = time.perf_counter()
            losses.append(step())
            seconds.append(time.perf_counter() - began)
        ranks = strategy.collectives.gather_objects((seconds, losses, peak))
    peaks = [peak for _, _, peak in ranks if peak is not None]
    return Measured(
        seconds=[max(each) for each in zip(*(seconds for seconds, _, _ in ranks), strict=True)],
        losses=[sum(each) / len(ranks) for each in zip(*(losses for _, losses, _ in ranks), strict=True)],
        peak_bytes=max(peaks, default=None),
    )
