"""The kernels in plain torch: any device, one layer at a time, and what every other backend must equal.

Written to be read, not to be fast.
"""
