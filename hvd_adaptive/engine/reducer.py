"""The reducer: has buckets reduced as gradients arrive, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from hvd_adaptive import checkpoint
from hvd_adaptive.adaptation.base import Controller, NullController
from hvd_adaptive.arrays import Float64s
from hvd_adaptive.buckets import Bucket
from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.comm.failure import means_lost_rank
from hvd_adaptive.comm.transport import JoinedRankError
from hvd_adaptive.config import CompressionConfig, ReducerOptions
from hvd_adaptive.engine.ballot import Ballot
from hvd_adaptive.engine.exchange import Exchange
from hvd_adaptive.engine.feedback_states import FeedbackStates
from hvd_adaptive.engine.hooks import GradientHooks
from hvd_adaptive.engine.known_costs import KnownCosts
from hvd_adaptive.engine.labels import labeled
from hvd_adaptive.engine.layer_agreement import refuse_dropped
from hvd_adaptive.engine.layout import Layout, Progress
from hvd_adaptive.engine.learning_rates import LearningRates
from hvd_adaptive.engine.loss import running_loss
from hvd_adaptive.engine.second_moments import SecondMoments
from hvd_adaptive.engine.state import restore_layers, restore_progress, run_of, state_of
from hvd_adaptive.engine.step_gradients import StepGradients
from hvd_adaptive.feedback import FeedbackContext
from hvd_adaptive.layers import PayloadKind
from hvd_adaptive.planning import Plan
from hvd_adaptive.planning.gradient_signals import release_steps


class Reducer:
    """Reduces the gradients of an optimizer's parameters over the ranks.

    The first step only learns: gradients are sent when all have been computed, in the order in which
    they arrived on rank 0. From then on a bucket is sent from the hook of the gradient that completes
    it. Buckets are always sent in that one order, and a layer without a gradient takes part with
    zeros, so that all ranks launch the same collectives whatever their gradients hold.

    Args:
        named: parameters and their names.
        config: the compressors.
        options: how gradients are sent.
        control: agreement between ranks.
        exchange: sends the buckets.
        active: False on a rank that communicates with nobody; it then does nothing at all.
        controller: changes levels during training; by default nothing does.
        messages: agreement on what is learned and planned; by default ``control``.
        costs: of network and compressors, where the controller goes by them, too.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Parameter]],
        config: CompressionConfig,
        options: ReducerOptions,
        control: Control,
        exchange: Exchange,
        active: bool = True,
        controller: Controller | None = None,
        messages: Control | None = None,
        costs: KnownCosts | None = None,
    ) -> None:
        self._active = active
        self._options = options
        self._control = control
        self._messages = messages or control
        self._exchange = exchange
        self._codecs = exchange.codec_states
        self._ballot = Ballot(exchange.transport, f"{exchange.prefix}.vote")
        self._hooks = GradientHooks(options.passes, active, self.arrive)
        self._gradients = StepGradients(self._hooks)
        self._rates = LearningRates(self._hooks)
        self.second_moments = SecondMoments(self._hooks, self._rates)
        context = FeedbackContext(self._rates.of, lambda: control.size, exchange.seed, exchange.rank)
        self._progress = Progress(self._rates)
        gradually = None if config.start is None else lambda: release_steps(self._progress.rounds)
        self._feedback = FeedbackStates(context, gradually)
        self._arrivals: list[int] = []
        self._parameters_changed = False
        self.touched = False
        """Whether a gradient has arrived since the last :meth:`synchronize`."""
        self.steps = 0
        """How often the optimizer has stepped."""
        for name, parameter in named:
            self.add(name, parameter)
        self._layout = Layout(
            self._hooks, config, options, control, exchange, self._feedback, self._progress,
            controller or NullController(), self._messages, costs,
        )  # fmt: skip
        self.controller.use_second_moments(self.second_moments.of)

    @property
    def plan(self) -> Plan:
        """What every layer does now, and why."""
        plan, outlook = self._layout.plan, self.controller.outlook
        decided = plan.step if outlook is None else max(plan.step, outlook.decided)
        return replace(plan, reasons=(*self.controller.reasons, *plan.reasons), decided=decided)

    def report_loss(self, loss: float) -> None:
        """The training loss of this step, which a planner may watch."""
        self.controller.report_loss(loss)

    def set_horizon(self, steps: int) -> None:
        """How many steps the whole training run has, for planners that look ahead."""
        self.controller.set_horizon(steps)

    @property
    def controller(self) -> Controller:
        return self._layout.controller

    def set_param_groups(self, param_groups: Callable[[], list[dict[str, Any]]]) -> None:
        """Follow the learning rates of the optimizer whose parameter groups these are."""
        self._rates.param_groups = param_groups

    # --- parameters and arriving gradients --------------------------------------------------------

    def add(self, name: str, parameter: Parameter) -> None:
        """Take one more parameter; from the next step on it is reduced."""
        self._hooks.add(name, parameter)
        self._parameters_changed = True

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()

    @property
    def passes(self) -> int:
        """Backward passes before a gradient is sent."""
        return self._hooks.passes

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes before a gradient is sent."""
        self._hooks.passes = passes
        self._hooks.rearm()

    def arrive(self, index: int) -> None:
        """A backward pass has accumulated the gradient of one parameter; its own hook says so."""
        trace = self._exchange.meter.trace
        if trace is None:
            self._take(index)
            return
        started = perf_counter()
        self._take(index)
        trace.span("hook", started, perf_counter(), layer=self._hooks.names[index])

    def _take(self, index: int) -> None:
        if not self.touched:
            self._begin()
        if not self._hooks.is_complete(index):
            return
        self._gradients.keep(index)
        if self._layout.buckets is None:
            self._arrivals.append(index)
        elif self._layout.launches.arrived(index) and not self._waits_for_all:
            for bucket in self._layout.launches.complete():
                self._launch(bucket)

    @property
    def _waits_for_all(self) -> bool:
        """Whether all gradients must have arrived before the first bucket is launched."""
        return self.controller.exact or self._feedback.must_observe_all

    def _begin(self) -> None:
        """A step begins: follow parameters that were frozen or unfrozen since the last one."""
        self.touched = True
        self._exchange.begin_step(self.rounds)
        if self._exchange.meter.writes and (loss := running_loss()) is not None:
            self._exchange.meter.loss(loss)
        self._codecs.begin_step(self._layout.steps)
        self._parameters_changed |= self._hooks.follow()
        if self._ranks_changed():
            self._layout.launches.clear()

    def _ranks_changed(self) -> bool:
        """Whether nothing is agreed with the ranks that there are now: in the first step."""
        return self._layout.other_ranks

    @property
    def _alone(self) -> bool:
        """Whether what is set between steps is agreed with nobody."""
        return not self._active

    # --- launching --------------------------------------------------------------------------------

    def _launch(self, bucket: Bucket) -> None:
        if bucket.kind is PayloadKind.SPARSE:
            self._exchange.start(bucket, [self._gradients.sparse(bucket.layers[0])])
            return
        grads = self._dense_gradients(bucket)
        if not self.controller.exact:
            self._show(bucket, grads)
        self._feedback.add_carried(bucket.layers, grads)
        self._exchange.start(bucket, grads)

    def _dense_gradients(self, bucket: Bucket) -> list[Tensor]:
        return [self._gradients.dense(layer.index) for layer in bucket.layers]

    def _show(self, bucket: Bucket, grads: Sequence[Tensor]) -> None:
        """Let the controller observe what is about to be compressed."""
        controller = self.controller
        if controller.observes(self.rounds):
            local, whole = self._feedback.preview(bucket, grads, controller.sees_feedback)
            sent = self._compress_before_launch(bucket, whole)
            for position, (layer, grad, x) in enumerate(zip(bucket.layers, local, whole, strict=True)):
                own = None if sent is None else sent[:, position]
                controller.observe(layer, grad, x, self.rounds, own)

    def _compress_before_launch(self, bucket: Bucket, x: Sequence[Tensor]) -> Float64s | None:
        """Compress to every level that the controller decides between; None where it does not wait."""
        chain = self.controller.chain(bucket.layers)
        if chain is None or not self._feedback.previews_exactly(bucket):
            return None
        states = self._codecs.by_key
        return self._exchange.payloads.compress(bucket.layers, x, *chain, states)

    def _complete(self) -> None:
        """Launch what has not been launched, and wait for everything."""
        buckets = self._layout.buckets
        assert buckets is not None
        if self.controller.exact and self._layout.launches.untouched:
            self._decide_before_launch(buckets)
        if self._feedback.must_observe_all:
            self._feedback.observe_all(self._layout.buckets or (), self._gradients.dense)
        for bucket in self._layout.launches.remaining():
            self._launch(bucket)
        if self._exchange.reduces_in_nodes:
            self._require_all_ranks()  # Horovod refuses nothing in a group without the rank that joined
        self.controller.learn()
        self._exchange.finish()

    def _decide_before_launch(self, buckets: Sequence[Bucket]) -> None:
        """Measure all gradients and plan with them before the first is sent."""
        for bucket in buckets:
            if bucket.kind is not PayloadKind.SPARSE:
                self._show(bucket, self._dense_gradients(bucket))
        self._layout.switch(self.controller.decide_before_launch(self.rounds))

    # --- the end of a step ------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Send what has not been sent, wait for everything, leave the results in the gradients.

        Raises:
            ValueError: ranks disagree on their layers.
            WireError: a payload is damaged.
            RuntimeError: a gradient was dropped on a rank, or ``hvd.join()`` does not work.
            HorovodInternalError, LostRankError: a rank has gone (elastic runs restore from the first).
        """
        if not self._active:
            return
        started = perf_counter()
        with labeled("synchronize"):
            self._synchronize()
        if self._exchange.meter.trace is not None:
            self._exchange.meter.trace.span("synchronize", started, perf_counter())

    def _synchronize(self) -> None:
        if not self.touched:
            self._begin()
        try:
            dropped, anywhere = self._reduce_all()
        except JoinedRankError:
            self._exchange.drain()
            self.reset()
            raise
        except RuntimeError as error:
            if means_lost_rank(error):
                self._break_off()
            raise
        self._gradients.bind_results()
        self._gradients.restore_layouts(self._layout.sparse if self._options.sparse_as_dense else ())
        self._progress.rounds += 1
        self._rearm()
        step, tries_next = self._layout.steps, self._layout.tries_next()
        if tries_next or step == 0 or (step > 0 and self._layout.config.changes_at(step)):
            self._layout.build()
        if anywhere:
            refuse_dropped(self._control, dropped)

    def _reduce_all(self) -> tuple[list[str], bool]:
        """Complete the step as it began, and follow what the ranks have voted for.

        A rank that changed its layout by itself would wait for the others forever, and they for it: so
        all ranks complete the step first, and learn at its end what any of them has met.

        Returns:
            Layers whose gradients have arrived here and have been dropped since, and whether there
            are any on some rank.
        """
        if self._layout.buckets is None:
            self._lay_out_first()
        dropped = self._vote()
        if self.controller.exact:
            self._require_all_ranks()  # it decides before anything is sent
        self._complete()
        self._feedback.return_carried(self._gradients.result)
        outcome = self._ballot.outcome()
        if self.controller.plans or outcome["adapt"] or self._codecs.collecting:
            self._require_all_ranks()
        if outcome["adapt"]:
            self._adapt()
        self._follow(outcome["collect"], outcome["ready"])
        self._codecs.learn(self._messages)
        self._codecs.learn_next = outcome["relearn"]
        self._progress.note_rates(outcome["rising"], self._options.lr_warmup)
        return dropped, outcome["dropped"]

    def _vote(self) -> list[str]:
        """Report what this rank has met in this step, and ask for what rank 0's planner wants."""
        dropped, wanted = self._gradients.dropped(), self.controller.votes(self.rounds)
        self._ballot.cast(
            self.rounds,
            None if self.controller.exact else self._exchange.take_along,
            adapt=self._parameters_changed,
            rising=self.rounds == 0 or self._rates.rising,
            relearn=self._rates.fell(self._codecs.least_drop),
            dropped=bool(dropped),
            **wanted._asdict(),
        )
        return dropped

    def _require_all_ranks(self) -> None:
        """JoinedRankError where a rank has called ``hvd.join()``: it would never hear of a plan."""
        if self._ballot.rank_is_missing:
            raise JoinedRankError("planners, with levels that are learned, or when layers change")

    def _follow(self, collect: bool, ready: bool) -> None:
        """Do what rank 0's planner asks for."""
        rate = max(self._rates.last, default=None)
        self.controller.end_step(self.rounds, rate, self._exchange.timings)
        self._layout.follow(collect, ready)

    def _lay_out_first(self) -> None:
        """Agree on the layers, and build their buckets."""
        self._agree()
        self._layout.build()

    def _agree(self) -> None:
        """Agree with all ranks on the layers and their order."""
        self._layout.agree(self._arrivals, self._gradients.seen_sparse())
        self._parameters_changed = False

    def _adapt(self) -> None:
        """Some rank trains other parameters than before: agree, and reduce those that are new."""
        before = set(self._layout.order)
        self._agree()
        self._gradients.take_back_frozen(self._feedback.kept(), self._exchange.transport.share)
        new = [name for name in self._layout.order if name not in before]
        if new:
            self._layout.build(new)
            self._complete()
        self._layout.build()

    def reset(self) -> None:
        """Forget the running step; what was launched in it is completed first."""
        self._exchange.finish()
        self._ballot.complete()
        self._rearm()

    def _break_off(self) -> None:
        """Horovod failed: the running step is forgotten, and the next is a first one."""
        self._abandon()
        self.reset()
        self._layout.forget_ranks()

    def _abandon(self) -> None:
        """Forget operations that never end."""
        self._exchange.abandon()
        self._ballot.abandon()

    def _rearm(self) -> None:
        self.touched = False
        self._arrivals.clear()
        self._gradients.clear()
        self._feedback.forget_step()
        self._hooks.rearm()
        self._layout.launches.rearm()

    # --- state ------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """How often gradients were synchronized."""
        return self._progress.rounds

    @property
    def memory_bytes(self) -> int:
        """Memory that feedback keeps from one step to the next."""
        return self._feedback.nbytes

    def configure(self, build: Callable[[CompressionConfig], CompressionConfig]) -> None:
        """Compress in another way from the next step on: see :meth:`Layout.configure`."""
        self._layout.configure(build, self._require_between_steps, self._alone)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, as :mod:`hvd_adaptive.checkpoint` describes it."""
        return state_of(self._layout, self._feedback, self._codecs, self._progress)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned on the same rank, between two steps.

        All ranks call it; where it raises, it does so on all of them, and nothing has changed.

        Raises:
            ValueError: the state is damaged or of another model, or ranks have states of different
                steps or runs: names the item and the rank.
            RuntimeError: gradients have arrived that have not been synchronized.
        """

        run = run_of(self._hooks, self._layout, self._options, self._control.size)

        def checked() -> Mapping[str, Any]:
            self._require_between_steps("compression state can only be loaded")
            checkpoint.check_state(state, run)
            return state

        self._control.agree(
            "load_compression_state_dict",
            checked,
            checkpoint.shared,
            alone=self._alone,
            remedy="every rank must load what it saved at the same step of one run",
        )
        restore_progress(state, self._codecs, self._progress)
        restore_layers(state, self._hooks, self._layout, self._feedback)

    def _require_between_steps(self, what: str) -> None:
        if self.touched:
            raise RuntimeError(f"{what} between steps: call it before backward(), or after step()")
