"""What users' functions take, asked before they are called."""

from __future__ import annotations

import functools

import pytest

from shard_core.errors import InvalidOption
from shard_core.plugins.signatures import check_signature


def policy(module, recurse, *, nonwrapped_numel):
    raise AssertionError("asking must not call")


class Policy:
    def __call__(self, module, recurse, nonwrapped_numel):
        raise AssertionError("asking must not call")


@pytest.mark.parametrize(
    "function",
    [policy, Policy(), functools.partial(policy, recurse=True), lambda **anything: None, dict, type],
    ids=["function", "object", "partial", "lambda", "class", "written in C"],
)
def test_what_fits_passes_uncalled(function):
    check_signature("wrap", function, "policy(...)", module=None, recurse=True, nonwrapped_numel=0)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda module: None, "<lambda>(module) does not fit: got an unexpected keyword argument 'recurse'."),
        (functools.partial(policy, 1, 2), "does not fit: got an unexpected keyword argument 'module'."),
        (Policy, "Policy() does not fit: got an unexpected keyword argument 'module'."),
    ],
    ids=["too few", "bound already", "a class that was not made"],
)
def test_what_does_not_fit_is_shown_beside_the_call(function, says):
    with pytest.raises(InvalidOption) as refusal:
        check_signature("wrap", function, "policy(...)", module=None, recurse=True, nonwrapped_numel=0)
    assert str(refusal.value).startswith("wrap is called as policy(...), but ")
    assert str(refusal.value).endswith(says)
