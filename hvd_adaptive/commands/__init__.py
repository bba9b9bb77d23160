"""Commands of the package, each run as ``python -m hvd_adaptive.commands.NAME``."""
