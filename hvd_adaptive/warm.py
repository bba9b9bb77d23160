"""Older name of :mod:`hvd_adaptive.commands.precompile`, for ``python -m hvd_adaptive.warm``."""

from __future__ import annotations

import warnings

from hvd_adaptive.commands.precompile import main

if __name__ == "__main__":
    warnings.warn(
        "hvd_adaptive.warm was renamed: write python -m hvd_adaptive.commands.precompile",
        DeprecationWarning,
        stacklevel=1,
    )
    main()
