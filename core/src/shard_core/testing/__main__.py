"""``python -m shard_core.testing NAME`` holds an installed strategy to the conformance kit."""

from shard_core.testing.command import command

if __name__ == "__main__":
    command(prog_name="python -m shard_core.testing")
