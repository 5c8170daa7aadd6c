"""The error of a launch that failed: which of several failed ranks was the first, and what it died of."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from shard_core.errors import LaunchError, RankFailed
from shard_core.launcher.pickling import UNGUARDED, UNGUARDED_EXIT
from shard_core.launcher.rank_call import LINGER_SECONDS
from shard_core.launcher.report import DONE, FAILED, REFUSED, Report, read_report
from shard_core.launcher.watch import Death


def launch_error(folder: str, num_processes: int, exits: Mapping[int, int], deaths: Sequence[Death]) -> LaunchError:
    """Return the error of a launch that failed.

    Args:
        folder: Where the ranks reported.
        num_processes: How many ranks there were.
        exits: Exit status of the ranks the agent saw fail.
        deaths: The ends of ranks in the order in which they were noticed.

    Returns:
        The error to raise: about the rank that failed first, not those it took with it.
    """
    reports = [report for rank in range(num_processes) if (report := read_report(folder, rank))]
    refused = [report for report in reports if report.state == REFUSED]
    if refused:
        return LaunchError(refused[0].cause)
    if not reports and UNGUARDED_EXIT in exits.values():
        return LaunchError(UNGUARDED)
    raised = sorted((report for report in reports if report.state == FAILED), key=lambda report: report.when)
    unreported = _first_unreported(reports, exits, deaths)
    if raised and (unreported is None or unreported.when > raised[0].when + LINGER_SECONDS):
        first = raised[0]
        message = f"rank {first.rank} of {num_processes} failed: {first.cause}{_finished_before(first, reports)}"
        message += f"\n\n{first.detail}"
        return RankFailed(message, first.sentence)
    assert unreported is not None
    return _died(unreported, num_processes, reports)


def _finished_before(failed: Report, reports: Sequence[Report]) -> str:
    """Name the ranks that had finished when another failed: it may have failed because it waited for them."""
    gone = [report for report in reports if report.state == DONE and report.when < failed.when]
    if not gone:
        return ""
    named = ", ".join(f"rank {each.rank}" + (f" ({each.cause})" if each.cause else "") for each in gone)
    return (
        f"\n{named} had finished by then; if rank {failed.rank} waited there in a collective, the ranks did not take "
        "equally many steps."
    )


def _first_unreported(reports: Sequence[Report], exits: Mapping[int, int], deaths: Sequence[Death]) -> Death | None:
    """Find the rank that died first of those that have not reported an error."""
    reported = {report.rank for report in reports if report.state == FAILED}
    for death in deaths:
        if death.rank not in reported:
            code = exits.get(death.rank) if death.code is None else death.code
            return Death(rank=death.rank, code=code, when=death.when)
    unseen = [Death(rank=rank, code=code, when=0.0) for rank, code in exits.items() if rank not in reported]
    return unseen[0] if unseen else None


def _died(death: Death, num_processes: int, reports: Sequence[Report]) -> RankFailed:
    states = {report.rank: report.state for report in reports}
    stage = {None: " before it reached the function", DONE: " after the function had returned"}
    when = stage.get(states.get(death.rank), "")
    hint = "; what it printed stands above"
    if death.code is None:
        how = "left without an error or a result"
    elif death.code < 0:
        how = f"was ended by signal {_signal_name(-death.code)}"
        hint = " (often: out of memory)" if -death.code == signal.SIGKILL else hint
    else:
        how = f"left with exit status {death.code}"
    return RankFailed(f"rank {death.rank} of {num_processes} {how}{when}{hint}.")


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)
