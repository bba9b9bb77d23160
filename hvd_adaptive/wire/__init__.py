"""What is sent: the bytes of a layer, and the frame around a bucket.

* :mod:`~hvd_adaptive.wire.frame`: header, parts of several compressors, what all ranks may gather.
* :mod:`~hvd_adaptive.wire.sparse`: positions and values of some elements.
* :mod:`~hvd_adaptive.wire.quantized`: norms, codes, and the tables that decode them.
* :mod:`~hvd_adaptive.wire.varint`: numbers of one to nine bytes.
* :mod:`~hvd_adaptive.wire.errors`: what damaged bytes raise.
"""

from hvd_adaptive.wire.errors import TooLargeError, WireError
from hvd_adaptive.wire.sparse import ValueFormat

__all__ = ["TooLargeError", "ValueFormat", "WireError"]
