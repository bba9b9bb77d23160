"""The sinks of a run: opened on rank 0, and each disabled where it fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

from hvd_adaptive.telemetry.config import Telemetry
from hvd_adaptive.telemetry.loggers import LOGGERS, SinkFactory
from hvd_adaptive.telemetry.sinks import JsonLinesSink, Sink
from hvd_adaptive.telemetry.tensorboard import TensorBoardSink

__all__ = ["Outputs", "open_sinks"]


class Outputs:
    """Sinks that are written to together; training continues without one that fails."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def write(self, write: Callable[[Sink], None]) -> None:
        """Call something with every sink."""
        for sink in list(self._sinks):
            try:
                write(sink)
            except Exception as error:
                self._disable(sink, error)

    def close(self) -> None:
        """Flush and close them; nothing is written from now on."""
        self.write(lambda sink: sink.flush())
        self.write(lambda sink: sink.close())
        self._sinks.clear()

    def _disable(self, sink: Sink, error: Exception) -> None:
        """Training continues without this log; one warning names the log and the reason."""
        self._sinks.remove(sink)
        reason = f"{type(error).__name__}: {error}"
        try:
            sink.close()
        except Exception as again:
            # Closing tries to write the rest, so it fails in the same way; another way is news.
            if str(again) != str(error):
                reason += f"; then closing it {type(again).__name__}: {again}"
        warnings.warn(
            f"telemetry: {type(sink).__name__} failed ({reason}) and is disabled; "
            "nothing more is written to it, training continues",
            RuntimeWarning,
            stacklevel=4,
        )


def open_sinks(telemetry: Telemetry) -> list[Sink]:
    """What rank 0 writes to.

    Raises:
        OSError: it cannot write to `telemetry.logdir`.
        ModuleNotFoundError: TensorBoard, or a logger, is wanted and not installed.
    """
    if telemetry.logdir is None:
        return []
    kinds: list[SinkFactory] = []
    if telemetry.tensorboard:
        kinds.append(TensorBoardSink)
    if telemetry.jsonl:
        kinds.append(JsonLinesSink)
    kinds += [LOGGERS[each] if isinstance(each, str) else each for each in telemetry.loggers]
    sinks: list[Sink] = []
    try:
        for kind in kinds:
            sinks.append(kind(telemetry.logdir))
    except OSError as error:
        _close(sinks)
        raise OSError(
            error.errno,
            f"telemetry cannot write to logdir {telemetry.logdir!r} ({error.strerror}): "
            "name a folder that rank 0 may create and write to, or write telemetry=None",
        ) from error
    except ModuleNotFoundError:
        _close(sinks)
        raise
    return sinks


def _close(sinks: Iterable[Sink]) -> None:
    for sink in sinks:
        sink.close()
