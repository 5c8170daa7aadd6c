"""The option ``--quick`` of every test session here: tests that start a process are left out as soon as they try."""

from __future__ import annotations

import _posixsubprocess
import sys
from typing import Any, NoReturn

import pytest

_STARTING = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--quick", action="store_true", help="leave out tests that start processes, ranks among them")


def pytest_configure(config: pytest.Config) -> None:
    """Leave tests from where they start a process; one that starts none runs as ever."""
    if config.getoption("quick"):
        sys.addaudithook(lambda event, _: _leave() if event in _STARTING else None)
        # What multiprocessing spawns with, which is no audited event.
        _posixsubprocess.fork_exec = _leave


def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> tuple[str, str, str] | None:
    """Count the tests that were left out apart from those that lack hardware."""
    if config.getoption("quick") and report.skipped and _LEFT_OUT in str(report.longrepr):
        return "not quick", "", "NOT QUICK"
    return None


_LEFT_OUT = "starts a process, which --quick leaves out"


def _leave(*_: Any) -> NoReturn:
    pytest.skip(_LEFT_OUT)
