"""What ``hva run`` and ``hva predict`` put in the place of Horovod's functions."""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

from hvd_adaptive.arguments import from_horovod
from hvd_adaptive.collectives import reduces_in_nodes
from hvd_adaptive.comm.startup import NICENESS
from hvd_adaptive.comm.startup import init as start
from hvd_adaptive.commands.rehearsal import Rehearsal
from hvd_adaptive.compressors import format_spec
from hvd_adaptive.optimizer import DistributedOptimizer
from hvd_adaptive.telemetry import Meter
from hvd_adaptive.telemetry.summary import Summary


def install(hvd: ModuleType, settings: Mapping[str, Any], replaced: list[str]) -> None:
    """Replace ``DistributedOptimizer`` and ``init``, for whoever imports them from now on.

    Args:
        hvd: the module ``horovod.torch``, just loaded.
        settings: ``arguments`` of :func:`hvd_adaptive.DistributedOptimizer` that go before the
            script's; ``niceness`` of :func:`hvd_adaptive.init`, or None; ``rehearsal`` where the
            script is to end after some steps, with settings of
            :class:`~hvd_adaptive.commands.rehearsal.Rehearsal`; ``program``, which speaks.
        replaced: gets a line for each call of the script, also one that was refused.
    """
    arguments: dict[str, Any] = dict(settings["arguments"])
    rehearsal = settings.get("rehearsal")
    program = settings.get("program", "hva run")
    watch = None
    if rehearsal is None:
        _show_decisions(program)
    else:
        watch = Rehearsal(hvd, rehearsal).watch
    wrap = _Wrapping(hvd, arguments, replaced, program, watch)
    for module in (hvd, sys.modules["horovod.torch.optimizer"]):
        module.DistributedOptimizer = wrap.function()  # type: ignore[attr-defined]
    niceness = NICENESS if settings["niceness"] is None else int(settings["niceness"])
    hvd.init = _init(hvd, niceness, arguments.get("scheme"))  # type: ignore[attr-defined]


def _show_decisions(program: str) -> None:
    """Rank 0 says what ``auto`` decides, unless the script has set up logging, which then shows it."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{program}: %(message)s"))
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    logger = logging.getLogger("hvd_adaptive")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _init(hvd: ModuleType, niceness: int, scheme: str | None) -> Any:
    stock = hvd.init
    hierarchical = False
    if scheme is not None:
        with suppress(ValueError):  # the optimizer says so, to all ranks
            hierarchical = reduces_in_nodes(scheme)

    @functools.wraps(stock)
    def init(*args: Any, **kwargs: Any) -> None:
        if hvd.is_initialized():
            stock(*args, **kwargs)
        else:
            start(*args, niceness=niceness, hierarchical=hierarchical, **kwargs)

    return init


class _Wrapping:
    """Calls of ``hvd.DistributedOptimizer``.

    Args:
        hvd: the module ``horovod.torch``.
        arguments: those that go before the script's.
        replaced: gets a line for each call.
        program: that speaks.
        watch: gets each optimizer that was made.
    """

    def __init__(
        self,
        hvd: ModuleType,
        arguments: dict[str, Any],
        replaced: list[str],
        program: str,
        watch: Callable[[Any], None] | None,
    ) -> None:
        self._program, self._watch = program, watch
        self._hvd = hvd
        self._stock = hvd.DistributedOptimizer
        self._signature = inspect.signature(self._stock)
        self._arguments = arguments
        self._replaced = replaced

    def function(self) -> Any:
        """What a script calls. Horovod looks at its ``__module__``, which is that of its own."""

        @functools.wraps(self._stock)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return self._wrap(self._signature.bind(*args, **kwargs).arguments)

        return wrapped

    def _wrap(self, given: dict[str, Any]) -> Any:
        if given.get("op") == self._hvd.Adasum and self._is_plain(given):
            self._say("left op=hvd.Adasum to Horovod, whose gradients cannot be compressed")
            return self._stock(**given)
        try:
            optimizer: Any = DistributedOptimizer(**{**given, **self._arguments})
        except ValueError as error:
            # it judges its arguments on all ranks together, so all of them end here
            self._say(str(error))
            raise SystemExit(2) from None
        if self._watch is not None:
            self._watch(optimizer)
        else:
            self._sum_up_at_the_end(optimizer.meter)
        self._say(f"hvd.DistributedOptimizer is hvd_adaptive's: {self._description(given)}")
        return optimizer

    def _sum_up_at_the_end(self, meter: Meter) -> None:
        """Rank 0 then says what its steps took and sent, and what bounded them."""
        if self._hvd.rank() == 0:
            atexit.register(lambda: self._print_summary(meter.summary()))

    def _print_summary(self, summary: Summary) -> None:
        for text in filter(None, (summary.line(), summary.verdict)):
            self._print(text)

    def _is_plain(self, given: Mapping[str, Any]) -> bool:
        compression = self._arguments.get("compression", from_horovod(given.get("compression", "none")))
        return compression == "none" and not {"overrides", "planner", "dense_steps"} & {
            *self._arguments
        }

    def _description(self, given: Mapping[str, Any]) -> str:
        own = _spec(from_horovod(given.get("compression", "none")))
        shown = {"compression": own, **self._arguments}
        text = ", ".join(f"{name} {value}" for name, value in shown.items())
        if own not in ("none", shown["compression"]):
            text += f" (in the place of the script's {own})"
        if self._hvd.size() == 1:
            text += "; one rank sends nothing: start it with horovodrun, mpirun or srun"
        return text

    def _say(self, text: str) -> None:
        """A line of rank 0, which is then the last word: nothing is said of what was not replaced."""
        self._replaced.append(text)
        if self._hvd.rank() == 0:
            self._print(text)

    def _print(self, text: str) -> None:
        print(f"{self._program}: {text}", file=sys.stderr, flush=True)


def _spec(compression: Any) -> str:
    """A compressor as it is written, or as Python names it where it cannot be written."""
    try:
        return format_spec(compression)
    except (TypeError, ValueError, AttributeError):
        return str(getattr(compression, "__name__", compression))
