"""``template`` keeps every promise of the contract."""

from shard_core.testing import Conformance


class TestTemplate(Conformance):
    strategy = "template"
