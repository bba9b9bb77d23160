"""``python -m hvd_adaptive COMMAND``, which the script ``hva`` is short for."""

from __future__ import annotations

import sys

from hvd_adaptive.commands import main

if __name__ == "__main__":
    sys.exit(main())
