"""What errors say of other ranks: that one is gone, or which one says more of the same."""

from __future__ import annotations

import sys
from typing import Final, TypeVar

ErrorT = TypeVar("ErrorT", bound=BaseException)

_TOLD_BY: Final = "_hva_told_by"


class LostRankError(RuntimeError):
    """Another rank has failed, ended or was killed, or has not answered in time.

    What torch.distributed says of it is the cause; Horovod raises its own ``HorovodInternalError``.
    """


def has_failed() -> bool:
    """Whether this process ends with an error that nobody caught, or Ctrl-C.

    Example:
        >>> has_failed()
        False
    """
    return hasattr(sys, "last_value")  # set by Python before it prints the error


def means_lost_rank(error: BaseException) -> bool:
    """Whether an error says that another rank is gone.

    Example:
        >>> means_lost_rank(LostRankError("closed")), means_lost_rank(ValueError("bad data"))
        (True, False)
    """
    horovod = sys.modules.get("horovod.common.exceptions")
    own = (LostRankError,) if horovod is None else (LostRankError, horovod.HorovodInternalError)
    return isinstance(error, own)


def told_by(who: str, error: ErrorT) -> ErrorT:
    """Mark an error that several ranks raise for the same reason: another one prints it in full.

    Example:
        >>> raise told_by("rank 0", ValueError("the ranks disagree"))
        Traceback (most recent call last):
        ValueError: the ranks disagree
    """
    setattr(error, _TOLD_BY, who)
    return error


def told_here(error: ErrorT) -> ErrorT:
    """Mark an error that several ranks raise for the same reason: this one prints it in full.

    Whichever of them ends first: else each could name another one that says more.

    Example:
        >>> raise told_here(ValueError("the ranks disagree"))
        Traceback (most recent call last):
        ValueError: the ranks disagree
    """
    return told_by("", error)


def teller_of(error: BaseException) -> str | None:
    """Who prints an error in full: another rank's name, or ``""`` for this one; None if unmarked."""
    teller: str | None = getattr(error, _TOLD_BY, None)
    return teller
