"""Errors that say that another rank is gone, whichever library reports it."""

from __future__ import annotations

import sys


class LostRankError(RuntimeError):
    """Another rank has failed, ended or was killed, or has not answered in time.

    What torch.distributed says of it is the cause; Horovod raises its own ``HorovodInternalError``.
    """


def means_lost_rank(error: BaseException) -> bool:
    """Whether an error says that another rank is gone.

    Example:
        >>> means_lost_rank(LostRankError("closed")), means_lost_rank(ValueError("bad data"))
        (True, False)
    """
    horovod = sys.modules.get("horovod.common.exceptions")
    own = (LostRankError,) if horovod is None else (LostRankError, horovod.HorovodInternalError)
    return isinstance(error, own)
