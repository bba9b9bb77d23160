"""The kernels for tensors on NVIDIA's GPUs, in Triton: the bytes are those of the other backends.

A call is for a bucket: some launches, however many layers there are, whose tables come from pinned
memory, and one wait for the size and the statistics (:mod:`~hvd_adaptive.kernels.triton.launching`).
What the compiler sees is in :mod:`~hvd_adaptive.kernels.triton.jit`; beside it is what the host does.

What remains is the reference's, in torch: ``position_bits`` of the sparse family on the device, and
``first_indices`` of ``subset``, which are in host memory.
``entropy`` is for host memory on every backend. How many elements the rules ``dgc`` and ``redsync``
send is found in torch, with a wait per layer. What is wrong with a damaged body is said by the
reference.

Not measured: no GPU has run these kernels yet. They were interpreted, byte for byte with the reference,
and compiled (``tests/kernels/test_triton.py``).
"""
