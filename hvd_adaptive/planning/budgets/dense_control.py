"""Whether compressed steps are faster than dense ones: measured side by side, not remembered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvd_adaptive.planning.explanation import in_ms

__all__ = ["DenseControl"]

SLOWER = 1.02
"""From how many times the seconds of dense steps on a compressed one counts as slower."""
FAR_SLOWER = 1.5
"""From how many times on a handful of steps are enough to say so."""
SURELY_SLOWER = 1.2
"""From how many times on it is no chance."""
LEAST_GAP, MOST_GAP = 50, 3200
"""Steps from one control to the next: doubled each time compression turns out to be faster."""
LEAST_PATIENCE, MOST_PATIENCE = 400, 12800
"""Steps after which half of a correction, as a logarithm, is forgotten: doubled each time compression
turns out to be slower, so that it is tried again ever more seldom, and later the slower it was."""
DOUBT = 30
"""Dense steps after which it is tested that compression is slower, where it had been faster: what its
steps met may be over."""
ANOTHER = 1.5
"""By how many times dense steps must have changed for a finding to hold no longer."""
LEAST_CORRECTION = 0.5
MOST_SLOWER = 2.0
"""Times the seconds of dense steps that compressed ones are believed to take at most. That is enough to
stay dense, and a handful of steps may just have met another program on the machine."""


@dataclass(slots=True)
class DenseControl:
    """A small state machine: compressed steps that look slower, dense steps right after, a finding.

    Dense steps of another hour are a bad measure on a machine that others use, too: it may just be
    slower now. So compressed steps that take longer than dense ones once did are followed by some dense
    ones, and only what these take counts. What findings say about the model of a step is its
    *correction*: the seconds of compressed steps over those that are foreseen. It follows the model, as
    what was found is by how much compressed steps are slower than dense ones, whatever is measured
    later. Of a small difference half counts, as a logarithm, and half of what was known: it may be
    chance. However slow they were, they count for twice what dense ones take. And where compressed
    steps had been faster before, by whatever plan, a finding is tested soon: it is set aside until they
    are slower again, after which those of before are forgotten.

    Example:
        >>> control = DenseControl()
        >>> control.looks_slower(0.13, 0.10, step=60)
        True
        >>> control.saw(0.11)
        >>> control.begin(0.13, levels=[3, 3])
        >>> control.conclude(dense=0.12, foreseen=0.1, step=80, known=1.0)
        'compressed steps took 130 ms, dense ones right after them 120 ms'
        >>> round(control.correction(81, dense=0.12, foreseen=0.1), 2)
        1.14
        >>> round(control.correction(81, dense=0.12, foreseen=0.11), 2)  # by a better model
        1.04
        >>> control.correction(81, dense=0.03, foreseen=0.1)  # steps of another kind
        1.0
        >>> control.doubts(110), control.test(110), control.correction(110, dense=0.12, foreseen=0.1)
        (True, None, 1.0)
        >>> control.begin(0.13, levels=[3, 3])
        >>> _ = control.conclude(dense=0.12, foreseen=0.1, step=160, known=1.0)
        >>> control.doubts(300)
        False
        >>> [round(control.correction(step, dense=0.12, foreseen=0.1), 2) for step in (161, 560, 960)]
        [1.14, 1.07, 1.03]
    """

    compressed: float | None = None
    """Seconds of a compressed step, while a control is on."""
    levels: tuple[int, ...] = ()
    """What each layer did in it."""
    found_levels: tuple[int, ...] = ()
    """The same of the last finding; none where nothing is known."""
    doubted: bool = False
    """Whether the last finding is to be tested."""
    tested: bool = False
    """Whether it is being tested, and set aside meanwhile."""
    gap: int = LEAST_GAP
    patience: int = LEAST_PATIENCE
    _next: int = 0
    _best: float = math.inf
    _slower: float = 0.0
    _found: int = 0
    _dense: float = math.inf

    @property
    def on(self) -> bool:
        """Whether dense steps are wanted for comparison."""
        return self.compressed is not None

    def looks_slower(self, seconds: float, dense: float, step: int, share: float = SLOWER) -> bool:
        """Whether compressed steps should be compared with dense ones.

        Args:
            seconds: that compressed steps take.
            dense: that dense steps took when there were some.
            step: the present one.
            share: of these from which on it counts.
        """
        return not self.on and seconds > share * dense and step >= self._next

    def saw(self, seconds: float) -> None:
        """Compressed steps took so long for a while, by whatever plan."""
        self._best = min(self._best, seconds)

    def begin(self, seconds: float, levels: Sequence[int]) -> None:
        """Dense steps follow compressed ones that took ``seconds``."""
        self.compressed, self.levels = seconds, tuple(levels)

    def give_up(self) -> None:
        """There is nothing to compare any more, as where the layers are others now."""
        self.compressed, self.found_levels, self._best = None, (), math.inf
        self.doubted = self.tested = False

    def doubts(self, step: int) -> bool:
        """Whether it is time to test a finding."""
        return not self.on and self.doubted and step >= self._found + DOUBT

    def test(self, step: int) -> None:
        """A plan is made that sets a finding aside, if it is time to."""
        if self.doubts(step):
            self.doubted, self.tested = False, True

    def pass_test(self) -> None:
        """Compressed steps are not slower this time: unless a control is on, the finding was chance."""
        if self.tested and not self.on:
            self.give_up()

    def conclude(self, dense: float, foreseen: float, step: int, known: float) -> str:
        """The dense steps are there.

        Args:
            dense: what they took.
            foreseen: what compressed ones would take, by a model that foresees ``dense``.
            step: the present one.
            known: the correction so far.

        Returns:
            What was found.

        Raises:
            ValueError: no control is on.
        """
        if self.compressed is None:
            raise ValueError("conclude comes after begin")
        compressed, self.compressed = self.compressed, None
        believed = min(compressed, MOST_SLOWER * dense)
        found = max(believed / max(foreseen, 1e-9), LEAST_CORRECTION)
        if compressed < SURELY_SLOWER * dense:
            found = math.sqrt(known * found)
        self.found_levels, self._dense = self.levels, dense
        self._slower = found * foreseen / max(dense, 1e-9)
        self.doubted = compressed >= dense > self._best and not self.tested
        if compressed < dense:
            self.gap = min(2 * self.gap, MOST_GAP)
        elif self.tested:
            self._best = math.inf  # of another time: it is no reason to doubt the next finding
        elif self._found and not self.doubted:
            self.patience = min(2 * self.patience, MOST_PATIENCE)
        self.tested = False
        self._found, self._next = step, step + (DOUBT if self.doubted else self.gap)
        return f"compressed steps took {in_ms(compressed)}, dense ones right after them {in_ms(dense)}"

    def correction(self, step: int, dense: float, foreseen: float) -> float:
        """Seconds of compressed steps over foreseen ones: 1 where nothing is known, or another thing.

        Args:
            step: the present one.
            dense: seconds of a dense step.
            foreseen: seconds of a step of :attr:`found_levels`, both as the model has them now.
        """
        if not self.found_levels or not self._dense / ANOTHER < dense < self._dense * ANOTHER:
            return 1.0
        if self.tested or self.doubts(step):
            return 1.0
        forgotten = max(0, step - self._found) // self.patience
        return float((self._slower * dense / max(foreseen, 1e-9)) ** (0.5**forgotten))

    def state_dict(self) -> dict[str, Any]:
        """JSON."""
        state = asdict(self)
        for name in ("_dense", "_best"):
            state[name] = None if math.isinf(state[name]) else state[name]
        return state

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> DenseControl:
        """From :meth:`state_dict`."""
        known = dict(state)
        if known.pop("_correction", None) is not None:  # older states know no levels of a finding
            known |= {"_dense": None, "found_levels": ()}
        times = {
            name: math.inf if known.get(name) is None else float(known[name])
            for name in ("_dense", "_best")
        }
        for each in ("levels", "found_levels"):
            known[each] = tuple(int(level) for level in known[each])
        return cls(**{**known, **times})
