"""The built-in strategies ``single`` and ``ddp``, found through their plugin as every backend is."""
