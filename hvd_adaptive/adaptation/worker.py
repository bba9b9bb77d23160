"""Rank 0's planner: it learns from every step, and plans in a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from hvd_adaptive.adaptation.messages import DecisionMessage, FailureMessage, Message
from hvd_adaptive.planning import Planner, StepMeasurements


class PlannerWorker:
    """A planner, the steps that it has yet to learn from, and the message that it has for all ranks.

    ``plan`` and ``observe`` of a planner must not run at the same time: while it plans in its thread,
    steps wait in the backlog.

    Args:
        planner: of this rank.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.message: Message | None = None
        """What all ranks are to get, until somebody takes it."""
        self.failure: Exception | None = None
        """What a :class:`FailureMessage` reports, on this rank."""
        self._backlog: list[StepMeasurements] = []
        self._pool: ThreadPoolExecutor | None = None
        self._future: Future[DecisionMessage] | None = None

    def add(self, facts: StepMeasurements) -> None:
        """A step that the planner is to learn from."""
        self._backlog.append(facts)

    def learn(self) -> None:
        """Let the planner learn from the steps that wait, unless it plans."""
        if self.planned:
            self.conclude()
        if not self.planning:
            self.observe_backlog()

    def observe_backlog(self) -> None:
        """Let the planner, which does not plan, learn from the steps that wait."""
        for facts in self._backlog:
            self.planner.observe(facts)
        self._backlog.clear()

    def start(self, plan: Callable[[], DecisionMessage]) -> None:
        """Plan in the thread; nothing else is under way there."""
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="hva-planner")
        self._future = self._pool.submit(plan)

    @property
    def planning(self) -> bool:
        """Whether a plan has been started whose outcome nobody has taken."""
        return self._future is not None

    @property
    def planned(self) -> bool:
        """Whether the thread is through with it."""
        return self._future is not None and self._future.done()

    def conclude(self) -> None:
        """Take the outcome of the plan; waits for it, and raises what the planner raised."""
        assert self._future is not None
        self.message, self._future = self._future.result(), None

    def wait(self) -> None:
        """Wait until the thread has nothing to do, whatever comes of it."""
        if self._future is not None:
            self._future.exception()

    def forget(self) -> None:
        """Drop the plan that is under way, and the message: they are of other layers."""
        self.message = self._future = None

    def take(self) -> Message | None:
        """The message, which is forgotten here."""
        message, self.message = self.message, None
        return message

    @property
    def failed(self) -> bool:
        """Whether the message is of a failure."""
        return isinstance(self.message, FailureMessage)

    def guard(self, work: Callable[[], None]) -> bool:
        """Do some work; what it raises becomes the message, because the other ranks wait for one.

        Returns:
            Whether it succeeded.
        """
        try:
            work()
        except Exception as error:
            self._future, self.failure = None, error
            self.message = FailureMessage(f"{type(error).__name__}: {error}")
            return False
        return True
