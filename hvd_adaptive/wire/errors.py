"""What is wrong with bytes that were received, or are about to be sent."""

from __future__ import annotations


class WireError(ValueError):
    """Bytes that no rank of this run can have sent: damaged, cut short, or of another bucket."""


class TooLargeError(ValueError):
    """More bytes than one operation can gather from all ranks; raised on all of them."""
