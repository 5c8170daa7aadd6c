"""``python -m shard_core`` is the ``shard`` command."""

from shard_core.cli.main import main

if __name__ == "__main__":
    main()
