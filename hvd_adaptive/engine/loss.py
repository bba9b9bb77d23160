"""The loss of a running backward pass, for the telemetry of scripts that report none."""

from __future__ import annotations

import sys
from types import FrameType

from torch import Tensor

_NEAR = 12
"""Frames between a gradient hook and ``torch.autograd.backward``, at most."""


def running_loss() -> float | None:
    """The number on which ``backward()`` was called that runs now; None where there is none.

    Called from a gradient hook, which on a CPU runs in the thread that called ``backward()``: the
    arguments of that call are looked up in the stack, so that nothing of torch has to be replaced. On a
    GPU hooks run in a thread of their own, and this returns None. Cost: some 2 us.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAR):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_name == "backward" and code.co_filename.endswith("autograd/__init__.py"):
            return _scalar(frame.f_locals.get("tensors"))
        frame = frame.f_back
    return None


def _scalar(roots: object) -> float | None:
    if isinstance(roots, list | tuple):
        roots = roots[0] if len(roots) == 1 else None
    if isinstance(roots, Tensor) and roots.numel() == 1 and roots.device.type == "cpu":
        return float(roots.detach())
    return None
