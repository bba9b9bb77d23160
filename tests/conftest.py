"""What holds for all tests."""

from __future__ import annotations

import signal

# A shell that starts the tests in its background makes them, and all that they start, deaf to Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
