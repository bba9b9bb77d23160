"""Elastic runs: ranks that come and go, and weights that return to the last commit.

::

    commit ... step, step, a rank is lost | restore | Horovod starts again | first step: all ranks meet

A rank that joins builds its optimizer while the others train, so building one asks nothing of them. The
ranks meet in their first step together, and again in the first step after Horovod started again: they
compare their options, and what all hold alike comes from rank 0, like the weights. What a rank keeps
of its own gradients is committed and restored with the weights; of a rank that has gone it is lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.elastic.state import (
    OptimizerStateHandler,
    get_handler_registry,
    set_handler_registry,
)
from torch import Tensor

from hvd_adaptive.adaptation.base import Controller
from hvd_adaptive.comm.process_set_control import ProcessSetControl
from hvd_adaptive.compressors import format_spec
from hvd_adaptive.config import CompressionConfig
from hvd_adaptive.engine.reducer import Reducer
from hvd_adaptive.engine.state import progress_of, restore_progress
from hvd_adaptive.feedback import copied, format_rule

# --- commits --------------------------------------------------------------------------------------


class _Handler(OptimizerStateHandler):  # type: ignore[misc]
    """How ``hvd.elastic.TorchState`` treats one of our optimizers.

    A commit costs a copy of what feedback keeps, in memory and in time, as it does of the weights.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._commit = optimizer._reducer.commit()

    def save(self) -> None:
        super().save()
        self._commit = self.value._reducer.commit()

    def restore(self) -> None:
        super().restore()
        self.value._reducer.go_back(self._commit)

    def sync(self) -> None:
        self.value._reducer.leave()
        super().sync()


def follow(kind: type) -> None:
    """Let ``hvd.elastic.TorchState`` commit the compression state of optimizers of this class."""
    set_handler_registry([(kind, _Handler), *get_handler_registry()])


# --- meetings -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Member:
    """What a rank tells the others when they meet.

    Args:
        met: how many ranks there were at its last meeting; 0 if this is its first.
        rounds: how often it has synchronized gradients.
        moved: whether it has met nobody yet and its rank, or their number, has changed since it began.
        keeps: whether it has kept something of its gradients.
        torn: whether that is of a step that failed, and was not restored.
    """

    met: int
    rounds: int
    moved: bool
    keeps: bool
    torn: bool


@dataclass(frozen=True)
class _Meeting:
    """What all ranks know once they have met."""

    members: tuple[_Member, ...]

    @property
    def again(self) -> bool:
        """Whether some have trained together before."""
        return any(member.met for member in self.members)

    @property
    def renews(self) -> bool:
        """Whether a planner must start again: what it has measured is of other ranks."""
        return self.again or any(member.moved for member in self.members)

    def fits(self, member: _Member) -> bool:
        """Whether what a rank has kept belongs to the weights, which are rank 0's."""
        return not member.torn and member.rounds == self.members[0].rounds

    @property
    def holders(self) -> int:
        """How many ranks have kept something that belongs to the weights."""
        return sum(member.keeps and self.fits(member) for member in self.members)

    def news(self, planner: bool) -> str:
        """One line of what has changed; empty where nothing has.

        Args:
            planner: whether there is one.
        """
        stayed = sum(member.met > 0 for member in self.members)
        left = max(0, max(member.met for member in self.members) - stayed)
        unfit = sum(member.keeps and not self.fits(member) for member in self.members)
        parts = []
        if self.again:
            joined = len(self.members) - stayed
            parts.append(f"ranks: {joined} joined, {left} left, {len(self.members)} continue")
        if left and any(member.keeps for member in self.members):
            parts.append("what those that left had not sent yet is lost")
        if unfit:
            parts.append(f"{unfit} dropped what was not sent yet, because it is of other weights")
        if planner and self.renews:
            parts.append("the planner starts again: what it measured is of other ranks")
        return "; ".join(parts)


class ElasticReducer(Reducer):
    """A reducer whose ranks may be others from one step to the next.

    Args:
        args: of :class:`Reducer`.
        agree: raises on all ranks unless they were built with the same options; all ranks call it.
        new_controller: makes a controller for the current ranks; does not communicate.
        configure: writes the settings for a number of ranks into telemetry.
    """

    _control: ProcessSetControl

    def __init__(
        self,
        *args: Any,
        agree: Callable[[], object],
        new_controller: Callable[[], Controller],
        configure: Callable[[int], None],
    ) -> None:
        super().__init__(*args)
        self._agree_on_options = agree
        self._new_controller = new_controller
        self._configure = configure
        self._began_as = self._place()
        self._world: tuple[int, int] | None = None
        self._met = 0
        self._torn = False

    def _place(self) -> tuple[int, int]:
        """This rank, and how many there are."""
        return self._control.rank, self._control.size

    def _ranks_changed(self) -> bool:
        return self._place() != self._world

    @property
    def _alone(self) -> bool:
        """The ranks that it would be agreed with may not be there yet: they compare when they meet."""
        return super()._alone or self._ranks_changed()

    # --- commits ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, also between Horovod's new beginning and the next step."""
        if self._met and self._ranks_changed():
            self._plan_again()
        return super().state_dict()

    def commit(self) -> dict[str, Any]:
        """What must go back with the weights, for :meth:`go_back`."""
        return {
            "kept": self._feedback.state_dict(),
            "owned": self._feedback.owned(),
            "shards": self._layout.shards_dict(),
            "rates": dict(self._feedback.context.rates),
            "steps": self.steps,
            "progress": progress_of(self._codecs, self._progress),
        }

    def go_back(self, commit: Mapping[str, Any]) -> None:
        """Continue from a commit; Horovod may be down, and nothing is asked of other ranks."""
        self.leave()
        self._feedback.replace(copied(commit["kept"]), commit["rates"], commit["owned"])
        self._layout.load_shards(commit["shards"])
        self.steps = commit["steps"]
        self._codecs.by_key.clear()
        restore_progress(commit["progress"], self._codecs, self._progress)
        self._torn = False

    def leave(self) -> None:
        """Horovod has started again, or will: meet the ranks in the next step, which is a first one."""
        self._abandon()
        super().reset()
        self._layout.launches.clear()
        self._layout.forget_costs()  # some ranks may know more than others
        self._world = None

    def reset(self) -> None:
        """Forget the running step."""
        try:
            super().reset()
        except HorovodInternalError:
            # load_state_dict() after Horovod failed: what was under way never ends
            self._break_off()

    def _break_off(self) -> None:
        """The ranks have changed parts of what they keep, each another part."""
        self.leave()
        self._torn = True

    # --- meetings ---------------------------------------------------------------------------------

    def _lay_out_first(self) -> None:
        """Meet the other ranks, then lay out."""
        self._agree_on_options()
        mine = _Member(
            self._met, self.rounds, not self._met and self._began_as != self._place(),
            any(self._feedback.kept().values()), self._torn,
        )  # fmt: skip
        told = self._control.allgather(vars(mine))
        meeting = _Meeting(tuple(_Member(**member) for member in told))
        if not meeting.fits(mine):
            self._feedback.replace({}, {})
        self._take_over(meeting)
        # what was drawn and collected for this step was for another number of it
        self._exchange.begin_step(self.rounds)
        self._codecs.begin_step(self._layout.steps)
        super()._lay_out_first()
        if meeting.again and meeting.holders:
            self._reunite(meeting, fresh=not (mine.keeps and meeting.fits(mine)))
        self._tell(meeting)
        self._world, self._met, self._torn = self._place(), len(told), False

    def _take_over(self, meeting: _Meeting) -> None:
        """What all ranks hold alike is rank 0's; what belongs to a rank's place is of the new one."""
        if not meeting.again:
            self._control.agree(
                "set_compression", lambda: self._layout.config, CompressionConfig.digest
            )
        else:
            first = self._control.hand_out(
                {
                    "steps": self.steps,
                    "version": self.plan.version,
                    "config": _written(self._layout.config),
                    **progress_of(self._codecs, self._progress),
                }
            )
            self.steps = first["steps"]
            self._layout.plan = replace(self.plan, version=first["version"])
            self._codecs.by_key.clear()
            restore_progress(first, self._codecs, self._progress)
            if first["config"] != _written(self._layout.config):  # set_compression() was called there
                self._layout.config = CompressionConfig.of(**first["config"])
        if meeting.renews:
            self._plan_again()
            ranks = self._control.size
            rank, dense_traffic = hvd.rank(), 2 * (ranks - 1) / ranks
            self._exchange.meter.ranks_changed(self._exchange.rank, rank, dense_traffic)
            self._exchange.rank = self._feedback.context.rank = rank
            self._configure(ranks)

    def _plan_again(self) -> None:
        """What a planner has measured, and has under way, is of ranks that are no longer these."""
        self._layout.config = replace(self._layout.config, planned={}, sums={})
        self._layout.forget_costs()  # of which ranks that have just joined know nothing
        self._layout.controller = self._new_controller()

    def _reunite(self, meeting: _Meeting, fresh: bool) -> None:
        """Let ranks that have kept nothing begin with the mean of what the others have.

        So the mean over the ranks stays what it was: no gradient is lost or counted twice. Where
        gradients are summed, that is so if they begin with nothing. Costs one dense step.
        """

        def meet(flat: Tensor) -> tuple[Tensor, Tensor]:
            mine = flat.float()
            reduced = self._exchange.reduce(torch.zeros_like(mine) if fresh else mine)
            if not self._exchange.transport.averages:
                return torch.zeros_like(mine), reduced
            mean = reduced.mul_(len(meeting.members) / meeting.holders)
            return mean, mean

        for bucket in self._layout.buckets or ():
            self._feedback.merge_ranks(bucket, meet, fresh)

    def _tell(self, meeting: _Meeting) -> None:
        """Say on rank 0, once, what has changed."""
        news = meeting.news(self.controller.plans)
        if not news or self._control.rank != 0:
            return
        print(f"hvd_adaptive: step {self.steps}: {news}", file=sys.stderr, flush=True)
        self._exchange.meter.text("elastic", news, self.steps)


def _written(config: CompressionConfig) -> dict[str, Any]:
    """A choice without its plan, for :meth:`CompressionConfig.of`."""
    return {
        "compression": format_spec(config.compressor),
        "overrides": {pattern: format_spec(each) for pattern, each in config.overrides},
        "feedback": None if config.feedback is None else format_rule(config.feedback),
        "scheme": dict(config.schemes),
    }
