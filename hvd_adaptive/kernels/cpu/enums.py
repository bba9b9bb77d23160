"""Enumerations as plain numbers, which Numba compiles in."""

from __future__ import annotations

from hvd_adaptive.kernels.selection import STRIDES, SelectionRule
from hvd_adaptive.wire import ValueFormat
from hvd_adaptive.wire.sparse import Damage

FP32, FP16, BF16, INT8, SIGN = (int(value) for value in ValueFormat)
TOPK, THRESHOLD, DGC, REDSYNC = (int(rule) for rule in SelectionRule)
NEAR, FAR = STRIDES
TRUNCATED, OVERLONG, COUNT, FORMAT, PARAMETER, RUN, INDEX, LENGTH, PADDING, VALUE, TRAILING, GROUP = (
    int(damage) for damage in Damage if damage
)
