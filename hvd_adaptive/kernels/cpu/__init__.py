"""Kernels for host memory, in Numba: one call does all layers of a bucket, without the GIL.

Magnitudes are compared as their bits, and addresses are passed as int64: every bound is checked by
whoever forms the address.
"""
