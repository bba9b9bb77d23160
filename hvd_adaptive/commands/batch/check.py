"""Do ranks reach each other? Run by setup.sh and batch scripts under the launcher; rank 0 reports."""

import importlib.metadata
import platform

import horovod.torch as hvd
import torch
from mpi4py import MPI


def main() -> None:
    hvd.init()
    size, rank = hvd.size(), hvd.rank()
    assert size > 1, "Horovod sees one rank only: it does not use the MPI whose launcher started it"

    expected = sum(range(1, size + 1))
    reduced = hvd.allreduce(torch.full((1_000,), float(rank + 1)), op=hvd.Sum)
    assert torch.all(reduced == expected), f"Horovod's allreduce gave {reduced[0]}, not {expected}"

    world = MPI.COMM_WORLD.Dup()
    assert world.size == size, f"mpi4py sees {world.size} ranks, Horovod {size}: two different MPIs"
    total = world.allreduce(rank + 1)
    assert total == expected, f"mpi4py's allreduce gave {total}, not {expected}"
    world.Free()

    if rank == 0:
        built = {
            "MPI": hvd.mpi_built(),
            "Gloo": hvd.gloo_built(),
            "NCCL": bool(hvd.nccl_built()),
            "CUDA": hvd.cuda_built(),
        }
        features = ", ".join(name for name, there in built.items() if there)
        mpi_library = MPI.Get_library_version().replace("\0", "").split(",")[0].splitlines()[0]
        rows = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "horovod": f"{importlib.metadata.version('horovod')} with {features}",
            "MPI": mpi_library,
            "mpi4py": importlib.metadata.version("mpi4py"),
            "ranks tried": f"{size}, allreduce by Horovod and by mpi4py",
        }
        for name, value in rows.items():
            print(f"  {name:<12} {value}")
    hvd.shutdown()


main()
