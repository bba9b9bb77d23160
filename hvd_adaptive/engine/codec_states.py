"""Codec states: what compressors learn from the gradients, the same on all ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.compressors import Compressor, Learner, format_spec, parse
from hvd_adaptive.compressors.base import CodecState


class CodecStates:
    """The codec states of one optimizer, and the steps in which they learn."""

    def __init__(self) -> None:
        self.by_key: dict[Compressor, CodecState] = {}
        """The states by :attr:`Compressor.state_key`; one and the same object all the time."""
        self.learn_next = False
        """Whether all learners collect statistics in the next step, due or not."""

    def add_for(self, compressors: Iterable[Compressor]) -> None:
        """Make the states that compressors need and that are not there yet."""
        for compressor in compressors:
            state = None if compressor.state_key in self.by_key else compressor.new_state()
            if state is not None:
                self.by_key[compressor.state_key] = state

    def begin_step(self, step: int) -> None:
        """Have learners collect statistics in this step, if it is one that they learn from.

        Args:
            step: counted from the end of the dense steps.
        """
        for learner in self._learners():
            learner.collecting = step >= 0 and (self.learn_next or learner.due(step))

    @property
    def collecting(self) -> bool:
        """Whether some learner collects statistics in this step; the same on all ranks."""
        return any(learner.collecting for learner in self._learners())

    @property
    def least_drop(self) -> float:
        """Share by which a learning rate must fall for some learner to learn again; Inf without any."""
        return min((learner.drop for learner in self._learners()), default=math.inf)

    def learn(self, control: Control) -> None:
        """Let rank 0 fit to all ranks' statistics what every rank then uses; all ranks call it."""
        for learner in self._learners():
            if not learner.collecting:
                continue
            learner.collecting = False
            everyone = control.allgather(learner.statistics())
            learner.adopt(control.decide(functools.partial(learner.fit, everyone)))

    def state_dict(self) -> dict[str, Any]:
        """All states, by their compressors' specifications."""
        return {format_spec(key): state.state_dict() for key, state in self.by_key.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; states of other compressors stay.

        Raises:
            ValueError: a state does not fit its compressor.
        """
        for spec, learned in states.items():
            compressor = parse(spec)
            state = compressor.new_state()
            if state is None:
                raise ValueError(
                    f"compression state holds what {compressor.name!r} learned, which learns nothing"
                )
            state.load_state_dict(learned)
            self.by_key[compressor.state_key] = state

    def _learners(self) -> list[Learner]:
        """The learning states, in the same order on all ranks."""
        return [state for state in self.by_key.values() if isinstance(state, Learner)]
