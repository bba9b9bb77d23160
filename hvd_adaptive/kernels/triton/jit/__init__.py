"""What runs on the GPU: functions for Triton's compiler, which have no types that Python knows.

Two things keep the bytes those of the other backends. What rounds is written with Triton's
correctly rounded operations, and launched without contraction of ``a * b + c``
(:func:`hvd_adaptive.kernels.triton.launching.launch`). And sums whose order the format fixes are made
of explicit halves, as a reduction's own order depends on how a tile lies in registers.
"""
