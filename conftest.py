"""Fixtures every distribution's tests share."""

pytest_plugins = ("shard_core.testing.fixtures",)
