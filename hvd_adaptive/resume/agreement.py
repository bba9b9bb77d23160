"""What all ranks must agree on before any of them continues: errors, and when to stop.

Ranks are Horovod's, or those of torch.distributed. A rank that gives up alone leaves the others waiting
in their next collective. So whatever can fail on one rank only (its disk, its copy of the data) is
tried by all and judged together, and a signal that reaches one rank becomes a vote.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from hvd_adaptive.comm import world
from hvd_adaptive.comm.process_set_control import ProcessSetControl

T = TypeVar("T")

EXIT_CODES: dict[int, int] = {
    signal.SIGHUP: 129,
    signal.SIGINT: 130,
    signal.SIGTERM: 143,
    signal.SIGUSR1: 75,
}
"""Signals that end a run, and exit statuses. 75 is EX_TEMPFAIL: the batch scripts of ``hva slurm``
requeue a job whose ranks end with it."""

# Long enough to cost nothing, short enough for mpirun, which kills a second after its SIGTERM: a vote
# is read one interval after it was cast.
VOTE_SECONDS = 0.2
# A launcher and the terminal may both deliver one Ctrl-C.
SAME_SIGNAL_SECONDS = 1.0


class RunError(RuntimeError):
    """An error that all ranks know of: each of them may end without leaving another one waiting."""


def run_on_all_ranks(what: str, action: Callable[[], T]) -> T:
    """What ``action`` returns, on each rank; all ranks must call it.

    Costs one small allgather. The action must not communicate: where it fails on one rank, the others
    would wait within theirs.

    Args:
        what: is done, for messages; the same on all ranks.
        action: opens files, say.

    Returns:
        What this rank's action returned.

    Raises:
        RunError: on all ranks, if the action raised OSError or ValueError on any of them. Other errors
            are bugs: they end their rank at once, and the launcher the others.
    """
    result: T | None = None
    problem: str | None = None
    try:
        result = action()
    except (OSError, ValueError) as error:
        problem = str(error)
    problems: list[str | None] = ProcessSetControl(f"agree.{what}").allgather(problem)
    if any(message is not None for message in problems):
        raise RunError(f"{what}: " + _by_rank(problems))
    return result  # type: ignore[return-value]


def require_equal(what: str, value: Mapping[str, Any]) -> None:
    """Raise an error on all ranks, which names the difference, unless all have the same.

    Costs one small allgather.

    Args:
        what: is compared, for messages; the same on all ranks.
        value: JSON-serializable values, by name.

    Raises:
        RunError: on all ranks, if they differ.
    """
    values: list[Mapping[str, Any]] = ProcessSetControl(f"equal.{what}").allgather(dict(value))
    for rank, other in enumerate(values):
        for key in values[0]:
            if other.get(key) != values[0][key]:
                raise RunError(
                    f"{what}: the ranks differ in {key}: rank 0 has {values[0][key]!r}, rank {rank}"
                    f" has {other.get(key)!r}; start all ranks with the same options and data"
                )


def _by_rank(problems: list[str | None]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, message in enumerate(problems):
        if message is not None:
            ranks.setdefault(message, []).append(rank)
    if len(ranks) == 1 and None not in problems:
        return next(iter(ranks))
    return "; ".join(
        f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {message}"
        for message, who in ranks.items()
    )


class StopVote:
    """Turns a signal on any rank into one step at which all ranks stop.

    SIGHUP, SIGINT, SIGTERM and SIGUSR1 are handled from now on; a second one, a second or more later,
    ends the process as if nobody handled it, unless it is SIGHUP. A SIGHUP that was ignored when the
    process started, as under nohup, stays ignored.

    At intervals the ranks start a two-number allreduce and continue; its result is read at the next
    vote, when it has long arrived, so that nobody waits. How many polls lie between two votes is voted
    on, too: ranks may not consult their own clocks.

    Example:
        A loop that saves and ends with the status that batch systems requeue::

            stop = StopVote()
            for step in range(start, steps):
                if stop.poll():
                    checkpoints.save(Position(step))
                    sys.exit(stop.exit_code)
                ...
            stop.close()
    """

    def __init__(self) -> None:
        self.outcome = 0
        self._received = 0
        self._received_at = 0.0
        self._polls_to_vote = 1
        self._interval = 1
        self._pending: Callable[[], Tensor] | None = None
        self._last_vote = time.monotonic()
        for number in EXIT_CODES:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # Not by SIGHUP: shell, kernel and session each send one, and nobody who insists is left.
        insists = self._received and number != signal.SIGHUP
        if insists and now - self._received_at > SAME_SIGNAL_SECONDS:
            # Asked twice: do not make the user wait for a rank that hangs.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not self._received:
            self._received = number
            self._received_at = now

    @property
    def exit_code(self) -> int:
        """The status to end with: of the signal at which all stop, 0 where there was none."""
        return EXIT_CODES[self.outcome] if self.outcome else 0

    def poll(self) -> int:
        """The number of the signal at which all ranks stop now, or 0.

        All ranks must call it equally often, at the same places of the program. What was voted stays.
        """
        self._polls_to_vote -= 1
        if self.outcome == 0 and self._polls_to_vote <= 0:
            self.outcome = self._read_vote()
            if self.outcome == 0:
                self._cast_vote()
                self._polls_to_vote = self._interval
        return self.outcome

    def close(self) -> None:
        """Waits for the vote that is under way; all ranks must call it, after their last step."""
        self._read_vote()

    def _read_vote(self) -> int:
        if self._pending is None:
            return 0
        stop, negated_interval = self._pending().tolist()
        self._pending = None
        self._interval = -int(negated_interval)
        return int(stop)

    def _cast_vote(self) -> None:
        now = time.monotonic()
        seconds_per_poll = max((now - self._last_vote) / self._interval, 1e-6)
        self._last_vote = now
        # At most twice as long as before: one fast poll must not put the next vote far away.
        wanted = max(1, min(int(VOTE_SECONDS / seconds_per_poll), 2 * self._interval))
        # Largest signal number, smallest interval: one Max gives both.
        ballot = torch.tensor([self._received, -wanted], dtype=torch.float32)
        self._pending = world.current().begin_maximum(ballot, "train.stop_vote")
