"""``python -m hvd_adaptive.commands.report``."""

from __future__ import annotations

import sys

from hvd_adaptive.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
