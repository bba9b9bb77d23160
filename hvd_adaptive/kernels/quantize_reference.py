import numpy as np

FLOAT_MAX = 3.4028234663852886e38
WEIGHT_SHIFT = 13
WEIGHT_BINS = (0x3F800000 >> WEIGHT_SHIFT) + 1
def check_bits(*a): pass
def check_keys(keys, n):
    return np.zeros(n, np.uint64) if keys is None else np.ascontiguousarray(keys, np.uint64)
def errors_from_weights(): pass
