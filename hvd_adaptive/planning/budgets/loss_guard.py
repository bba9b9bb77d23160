"""Watches the training loss, where the user reports it: a rise that dense training would not show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LossGuard"]

_LEAST_RISE = 0.02
"""Share of the loss below which a rise counts as none, however significant."""


@dataclass(slots=True)
class _Window:
    """Sums of some losses."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, loss: float) -> None:
        self.count += 1
        before = loss - self.mean
        self.mean += before / self.count
        self.squares += before * (loss - self.mean)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return math.sqrt(self.squares / max(1, self.count - 1) / max(1, self.count))

    def to_list(self) -> list[float]:
        return [self.count, self.mean, self.squares]

    @classmethod
    def of(cls, state: list[float] | None) -> _Window | None:
        return None if state is None else cls(int(state[0]), float(state[1]), float(state[2]))


@dataclass(slots=True)
class LossGuard:
    """A small state machine: watching, then a control window of dense steps, then a verdict.

    A window whose mean loss is above the best one's by three standard errors and 2 % is a *rise*. The
    learning rate or the data may have caused it as well as compression, so ``size`` dense steps follow.
    If their loss is below the rise by two standard errors, compression caused it; else it is the new
    normal. Nothing here happens unless :meth:`observe` is called.

    Args:
        size: losses of a window.
    """

    size: int = 20
    wants_dense: bool = False
    """Whether the control window is due, or running."""
    verdict: str = ""
    """What the last control window has shown, until somebody takes it."""
    _running: _Window = field(default_factory=_Window)
    _best: _Window | None = None
    _rise: _Window | None = None

    def observe(self, loss: float, dense: bool) -> None:
        """One step's loss; ``dense`` if the step was sent without compression."""
        if not math.isfinite(loss):
            return
        if self.wants_dense and not dense:
            return  # the control window has not begun
        self._running.add(loss)
        if self._running.count < self.size:
            return
        window, self._running = self._running, _Window()
        if self.wants_dense:
            self._judge(window)
        elif self._best is None or window.mean < self._best.mean:
            self._best = window
        elif not dense and _above(window, self._best, 3.0, _LEAST_RISE):
            self._rise, self.wants_dense = window, True

    def _judge(self, control: _Window) -> None:
        assert self._rise is not None
        rise, self._rise, self.wants_dense = self._rise, None, False
        figures = (
            f"the loss rose to {rise.mean:.4g}, and was {control.mean:.4g} in {self.size} dense steps"
        )
        if _above(rise, control, 2.0, _LEAST_RISE / 2):
            self.verdict = f"stepped back: {figures}"
        else:
            self.verdict = f"compression is not the cause: {figures}"
            self._best = control

    @property
    def blames(self) -> bool:
        """Whether the verdict is that compression caused the rise."""
        return self.verdict.startswith("stepped back")

    def take_verdict(self) -> str:
        """The verdict, which is forgotten."""
        verdict, self.verdict = self.verdict, ""
        return verdict

    def state_dict(self) -> dict[str, Any]:
        """JSON."""
        windows = {"running": self._running, "best": self._best, "rise": self._rise}
        return {
            "wants_dense": self.wants_dense,
            "blames": self.blames,
            **{name: None if each is None else each.to_list() for name, each in windows.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; figures of an untold verdict are not kept."""
        self.wants_dense = bool(state["wants_dense"])
        self.verdict = "stepped back: the loss rose" if state["blames"] else ""
        self._running = _Window.of(state["running"]) or _Window()
        self._best, self._rise = _Window.of(state["best"]), _Window.of(state["rise"])


def _above(one: _Window, other: _Window, errors: float, share: float) -> bool:
    """Whether a mean is above another one by so many standard errors, and by a share of it."""
    rise = one.mean - other.mean
    return rise > errors * math.hypot(one.error, other.error) and rise > share * abs(other.mean)
