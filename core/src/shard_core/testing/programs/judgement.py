"""The judge of random programs: runs one under a strategy and in plain PyTorch, and tells rounding from a defect."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import tempfile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shard_core import plugins
from shard_core.errors import CheckpointError, RankFailed
from shard_core.precision.policies import POLICIES
from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.attempts import after_refusal
from shard_core.testing.programs.observation import run
from shard_core.testing.programs.parts import WRITING
from shard_core.testing.programs.parts.dropout import why_improper
from shard_core.testing.programs.plain.comparison import BOUNDS, distance, first_difference, flat, kind_of
from shard_core.testing.programs.plain.oracle import Oracle
from shard_core.testing.programs.plain.precisions import rounding
from shard_core.testing.programs.program import first_backward, segments, strategies_of
from shard_core.testing.programs.vocabulary import TOUCHES
from shard_core.testing.programs.writing.script import script_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shard_core.testing.processes.world import World
    from shard_core.testing.programs.observation import Trace
    from shard_core.testing.programs.plain.plain_run import Values
    from shard_core.testing.programs.program import Program

_JITTERED = 3
"""How many oracles are moved by rounding, to see how far it grows."""
_SENSITIVITY_ALLOWS, _COARSE_SENSITIVITY_ALLOWS = 30.0, 3.0
"""A value may differ further by so many times what rounding in weights and gradients moves it. In 16 bits that is a
fifth of a bound and not a fiftieth: thirty times that would pass what is a tenth off."""
_PATIENCE, _PATIENCE_OF_COMPILERS = 20.0, 120.0
_MUON_ALLOWS = 1000.0
"""Of weights. Torch's Muon orthogonalizes in bfloat16, in which other kernels round otherwise; where a gradient is of a
lower rank than it has rows, rounding is multiplied until it is as large as an update: the CPU's is as far from what
float64 gives as from other devices'."""
_SETTLES = 10.0
"""Rounding breaks a bound, jitter included, by less than this factor; float64 settles nothing beyond: a dtype that is
wrong for float32 alone is right there."""
_NEVER_RIGHT = ("CheckpointNotFound", "CheckpointCorrupted")
"""No refusal: a program loads what it has saved."""
_SEEDS = (ops.Seed, ops.Load, ops.Switch, ops.Fail, ops.Attempt)
"""What may have generators draw again what they have drawn."""
_SETS: dict[str, tuple[type[Any], ...]] = {
    "rates": (ops.ChangeLearningRate, ops.StepScheduler),
    "weights": (ops.EditWeights, ops.Initialize, ops.LoadStateDict),
}
"""What sets values without showing them, or may."""


class _Difference(NamedTuple):
    """The first value that differs: after which operation, of which kind, how, and by what factor too far."""

    at: int
    kind: str
    text: str
    excess: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """What came of a program.

    Attributes:
        verdict: ``"equal"``, ``"refused"`` or ``"defect"``.
        at: The operation it is about; -1 for setup.
        symptom: What is alike about two programs that fail for one reason.
        text: What was found.
        settled: Whether a bound was broken and found to be rounding.
        excess: By what factor a bound was broken; 0 for what no rounding does.
        onward: The program that failed, where that is one that went on after a refusal.
    """

    verdict: str
    at: int = -1
    symptom: str = ""
    text: str = ""
    settled: bool = False
    excess: float = 0.0
    onward: Program | None = None


def judge(program: Program, worlds: Callable[[int], World], *, timeout: float | None = None) -> Judgement:
    """Run a program on real ranks and hold what it shows to plain PyTorch, also after what was refused.

    Args:
        program: What to run.
        worlds: Returns a number of ranks.
        timeout: Seconds until a rank that has not returned counts as hung; by default what ``patience`` says.

    Returns:
        The verdict.
    """
    judgement = _settled(program, worlds, patience(program) if timeout is None else timeout)
    # Whether a save in the background has copied what is changed is a matter of time: tried again, it may have.
    tries = judgement.verdict == "refused" and not judgement.symptom.endswith(CheckpointError.__name__)
    onward = after_refusal(program, judgement.at) if tries else None
    later = judgement if onward is None else judge(onward, worlds, timeout=timeout)
    return dataclasses.replace(later, onward=later.onward or onward) if later.verdict == "defect" else judgement


def _settled(program: Program, worlds: Callable[[int], World], timeout: float) -> Judgement:
    """Judge a program; once more in float64 where a bound is broken."""
    judgement = _judge(program, worlds, timeout)
    if not 0 < judgement.excess <= _SETTLES:
        return judgement
    # A bound is broken: rounding all but disappears in float64, a defect stays.
    cards = map(plugins.find, strategies_of(program))
    if program.precision == "32-true" and all("64-true" in card.precisions for card in cards):
        exact = _judge(dataclasses.replace(program, precision="64-true"), worlds, timeout)
        if exact.verdict == "equal" or (exact.verdict == "refused" and exact.at > judgement.at):
            return dataclasses.replace(judgement, verdict="equal", settled=True)
    return judgement


def patience(program: Program) -> float:
    """Return how many seconds a program may take: more where it is compiled, or each new shape of it."""
    compiles = _has_own_kernels(program)
    return _PATIENCE_OF_COMPILERS if compiles or program.compiled else _PATIENCE


def _judge(program: Program, worlds: Callable[[int], World], timeout: float) -> Judgement:
    """Judge once."""
    folder = tempfile.mkdtemp(prefix="shard-program-")
    runs: list[list[Trace]] = []
    try:
        for segment in segments(program):
            runs.append(worlds(segment.world_size).run(run, script_of(program), folder, segment, timeout=timeout))
            if any(trace.stop for trace in runs[-1]):
                break
    except RankFailed as error:
        kind = "hang" if "did not return within" in str(error) else "died"
        return Judgement(verdict="defect", symptom=kind, text=str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with _own_generator():
        found = _compare(program, runs)
        if found and not program.precision.startswith("64"):
            found = _compare(program, runs, _sensitivity(program, runs))
    if found:
        symptom = f"{_name(program, found.at)} {found.kind}"
        excess = found.excess if math.isfinite(found.excess) else 0.0
        return Judgement(verdict="defect", at=found.at, symptom=symptom, text=found.text, excess=excess)
    kept = sorted({name for traces in runs for trace in traces for name in trace.kept})
    if kept:
        text = f"of what the strategies had set up, these were held once all were torn down: {', '.join(kept)}"
        return Judgement(verdict="defect", at=len(program.operations), symptom="held after teardown", text=text)
    altered = next((trace.altered for traces in runs for trace in traces if trace.altered), None)
    if altered:
        at, name = altered
        text = f"{name}, which the strategy had returned, was another after {_name(program, at)} (operation {at})"
        return Judgement(verdict="defect", at=at, symptom="changes what it returned", text=text)
    return _stops(program, runs[-1])


def _stops(program: Program, traces: Sequence[Trace]) -> Judgement:
    """Judge how ranks ended: alike, and by a sentence of ours, or it is a defect."""
    stops = [trace.stop for trace in traces]
    first = next((stop for stop in stops if stop is not None), None)
    if first is None:
        return Judgement(verdict="equal")
    where = _name(program, first.at)
    if any(stop is None or stop.alike != first.alike for stop in stops):
        return Judgement(verdict="defect", at=first.at, symptom=f"ranks disagree {where}", text=str(stops))
    if not first.ours or first.kind in _NEVER_RIGHT:
        return Judgement(verdict="defect", at=first.at, symptom=f"{where} {first.kind}", text=first.text)
    changed = next(filter(None, (_changed(program, trace) for trace in traces)), "")
    if changed:
        text = f"{first.kind}: {first.text} But it had changed {changed} by then."
        return Judgement(verdict="defect", at=first.at, symptom=f"changed {where}", text=text)
    return Judgement(verdict="refused", at=first.at, symptom=f"{where} {first.kind}", text=first.text)


def _changed(program: Program, trace: Trace) -> str:
    """Name what a refused operation changed of what was shown last."""
    assert trace.stop is not None
    for name in trace.stop.touched:
        if trace.stop.at < 0 or not isinstance(program.operations[trace.stop.at], TOUCHES[name]):
            return name
    for key, value in (trace.stop.after or {}).items():
        shown = max((at for at, values in enumerate(trace.shown, trace.begin) if key in values), default=None)
        if shown is None:  # state that there was none of
            return key
        since = program.operations[shown + 1 : trace.stop.at]
        by_user = any(isinstance(each, _SETS.get(key.partition(".")[0], ())) for each in since)
        before = torch.as_tensor(trace.shown[shown - trace.begin][key])
        if not by_user and not _as_before(key, before, torch.as_tensor(value)):
            return key
    return ""


def _has_own_kernels(program: Program) -> bool:
    """Return whether a program computes on devices with other kernels than the CPU's."""
    return bool(program.device) or any("cpu" not in plugins.find(name).devices for name in strategies_of(program))


def _as_before(key: str, before: torch.Tensor, after: torch.Tensor) -> bool:
    """Check that a tensor is as it was, or is what forwards change: a buffer, or the weight of such a part."""
    return torch.equal(before, after) or any(name in key for name in ("running", "tracked", "calls", *WRITING))


def _compare(
    program: Program, runs: Sequence[Sequence[Trace]], sensitivity: Mapping[tuple[int, str], float] | None = None
) -> _Difference | None:
    """Hold every value that was shown to the oracle's; return the first that differs."""
    oracle = _oracle(program, runs[0][0].data_rank[1])
    compiled = bool(program.compiled)
    scale = max(rounding(name, program.precision, compiled=compiled) for name in strategies_of(program))
    bounds = {kind: bound * scale for kind, bound in BOUNDS.items()}
    bounds["reduced"] = max(bounds["reduced"], BOUNDS["reduced"])  # of numbers in float32 under every precision
    further = {(at, key): _times(program, at, scale) * far for (at, key), far in (sensitivity or {}).items()}
    if _has_own_kernels(program) and any(each.kind == "muon" for each in program.optimizers):
        bounds["weights"] *= _MUON_ALLOWS
    scaled = POLICIES[program.precision].scaled
    before: list[torch.Tensor] = []
    for at, traces, truths in _truths(program, oracle, runs):
        if at >= 0 and isinstance(program.operations[at], _SEEDS):
            before.clear()
        improper = why_improper(_masks(traces, at), before)
        if improper:
            return _Difference(at, "masks", improper, math.inf)
        before.extend(mask for masks in _masks(traces, at).values() for mask in masks)
        for number, trace in enumerate(traces):
            if at - trace.begin >= len(trace.shown):
                continue
            rank = trace.data_rank[0]
            truth = truths[rank] | {"generator": oracle.generators[rank], "masks": dict(enumerate(oracle.masks[rank]))}
            shown = trace.shown[at - trace.begin]
            found = first_difference(shown, truth, at, further, bounds, whole=number == 0, scaled=scaled)
            if found:
                key, text, excess = found
                text = f"rank {number}, {_name(program, at)} (operation {at}): {key} {text}"
                return _Difference(at, kind_of(key), text, excess)
        oracle.adopt(traces[0].shown[at - traces[0].begin])
    return None


def _times(program: Program, at: int, scale: float) -> float:
    """Return how many times what rounding moves a value by it may differ.

    Optimizers that divide by a gradient's size make whole steps of rounding in 16 bits: those of float32 weights may.
    """
    steps = 0 <= at < len(program.operations) and isinstance(program.operations[at], ops.Step | ops.Closure)
    is_coarse = scale > 1 and not (steps and POLICIES[program.precision].parameter == "float32")
    return _COARSE_SENSITIVITY_ALLOWS if is_coarse else _SENSITIVITY_ALLOWS


def _truths(
    program: Program, oracle: Oracle, runs: Sequence[Sequence[Trace]]
) -> Iterator[tuple[int, Sequence[Trace], list[Values]]]:
    """Play what the ranks have shown; yield each operation's number, their traces, and what each should show."""
    for traces in runs:
        begin = traces[0].begin
        for at in range(begin, begin + len(traces[0].shown)):
            oracle.masks.update(_masks(traces, at))
            truths = oracle.play(program.operations[at]) if at >= 0 else [oracle.state()] * program.world_size
            if at == begin >= 0:
                oracle.generators = _derived(traces)
            yield at, traces, truths


def _masks(traces: Sequence[Trace], at: int) -> dict[int, list[torch.Tensor]]:
    """Return what each data rank's dropout has kept in an operation, where its device has a generator of its own."""
    shown = {
        trace.data_rank[0]: trace.shown[at - trace.begin] for trace in traces if at - trace.begin < len(trace.shown)
    }
    return {rank: list(values["masks"].values()) for rank, values in shown.items()}


def _derived(traces: Sequence[Trace]) -> list[torch.Tensor]:
    """Return the generators that ranks go on with where they are not as many as before: theirs to derive, all apart."""
    by_rank = {trace.data_rank[0]: trace.shown[0]["generator"] for trace in traces if trace.shown}
    states = [by_rank.get(rank, torch.empty(0)) for rank in range(traces[0].data_rank[1])]
    alike = {each.numpy().tobytes() for each in states}
    return states if len(alike) == len(states) else [torch.empty(0)] * len(states)


def _sensitivity(program: Program, runs: Sequence[Sequence[Trace]]) -> dict[tuple[int, str], float]:
    """Measure how far each value moves when weights and gradients are moved by rounding."""
    generator = torch.Generator().manual_seed(program.seed)
    ranks = runs[0][0].data_rank[1]
    plain = _oracle(program, ranks)
    jittered = [_oracle(program, ranks) for _ in range(_JITTERED)]
    sensitivity: dict[tuple[int, str], float] = {}
    for steps in zip(*[_truths(program, each, runs) for each in (plain, *jittered)], strict=True):
        (at, traces, truths), *others = steps
        for _, _, moved in others:
            for truth, other in zip(truths, moved, strict=True):
                for key, value in flat(truth).items():
                    far = distance(flat(other).get(key, value), value)
                    if math.isfinite(far):
                        sensitivity[at, key] = max(sensitivity.get((at, key), 0.0), far)
        for each in (plain, *jittered):
            each.adopt(traces[0].shown[at - traces[0].begin])
        for each in jittered:
            each.jitter(generator)
    return sensitivity


def _name(program: Program, at: int) -> str:
    return type(program.operations[at]).__name__ if 0 <= at < len(program.operations) else "setup"


def _oracle(program: Program, ranks: int) -> Oracle:
    """Build the oracle of a program, up to its first operation."""
    oracle = Oracle(program, ranks, _exchanges(program))
    if program.warmed:
        oracle.play(first_backward(program))
    return oracle


def _exchanges(program: Program) -> dict[str, bool]:
    """Ask each strategy's card whether ranks exchange buffers before each forward."""
    cards = {name: plugins.find(name) for name in strategies_of(program)}
    return {
        name: "broadcast_buffers=False" not in program.options
        and any(option.name == "broadcast_buffers" and option.default is True for option in card.options)
        for name, card in cards.items()
    }


@contextlib.contextmanager
def _own_generator() -> Iterator[None]:
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)
