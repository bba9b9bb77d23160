"""hvd_adaptive for Spack 1.0 or newer, from the clone that holds this file.

``spack repo add launch/packages/spack_repo/hvd_adaptive && spack install py-hvd-adaptive``
"""

from pathlib import Path

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage

CLONE = Path(__file__).resolve().parents[6]


class PyHvdAdaptive(PythonPackage):
    """Gradient compression for Horovod and PyTorch that decides by itself how hard to compress each
    layer."""

    git = CLONE.as_uri()
    license("Apache-2.0")
    import_modules = ("hvd_adaptive", "hvd_adaptive.compressors", "hvd_adaptive.planning")

    version("0.1.0", branch="main")

    variant("horovod", default=True, description="Train over Horovod's operations")
    variant("cuda", default=False, description="Let Horovod reduce gradients of GPUs, by NCCL")
    variant("tensorboard", default=False, description="Write telemetry for TensorBoard")
    conflicts("+cuda", when="~horovod")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@64:", type="build")
    depends_on("py-torch@2.1:", type=("build", "run"))
    depends_on("py-numpy", type=("build", "run"))
    depends_on("py-numba", type=("build", "run"))
    depends_on("py-mpi4py", type=("build", "run"))
    depends_on("py-tensorboard", when="+tensorboard", type="run")
    # Spack's Horovod has the patches that the last release lacks
    depends_on("py-horovod@0.28.1 frameworks=pytorch controllers=mpi", when="+horovod", type="run")
    depends_on("py-horovod+cuda tensor_ops=nccl", when="+horovod+cuda", type="run")
    depends_on("py-horovod~cuda tensor_ops=mpi", when="+horovod~cuda", type="run")
    # horovodrun imports distutils, which Python no longer has; setuptools brings it
    depends_on("py-setuptools", when="+horovod ^python@3.12:", type="run")
