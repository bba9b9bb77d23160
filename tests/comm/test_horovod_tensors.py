"""No rank hangs that hands operations to Horovod while another one ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.harness.lab import horovodrun
from tests.harness.rank_launcher import ENVIRONMENT, ROOT

pytest.importorskip("horovod.torch", reason="Horovod is not installed")

pytestmark = pytest.mark.distributed

HANDS_OVER = """
import faulthandler, itertools, sys, time
import horovod.torch as hvd, numpy as np, torch
from horovod.common.exceptions import HorovodInternalError
from hvd_adaptive.comm.horovod_channel import HorovodChannel
from hvd_adaptive.comm.horovod_transport import HorovodTransport
from hvd_adaptive.comm.request import SUM, Request

hvd.init()
hvd.allreduce(torch.zeros(1))
if hvd.rank() == 1:
    time.sleep(0.5)
    sys.exit(0)
transport, channel = HorovodTransport(SUM, hvd.global_process_set), HorovodChannel("messages")
view = torch.zeros(8)[:4]
sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,))
kinds = [
    lambda name, step: transport.submit(Request("allreduce", view), name, step),
    lambda name, step: transport.submit(Request("allgather", view), name, step),
    lambda name, step: transport.submit(Request("alltoall", view, splits=(2, 2)), name, step),
    lambda name, step: transport.submit(Request("sparse", sparse), name, step),
    lambda name, step: channel.mean(np.zeros(2)),
    lambda name, step: channel.gather(np.zeros(2)),
    lambda name, step: hvd.broadcast_async(view, 0, name=name),
]
faulthandler.dump_traceback_later(60, exit=True)  # which does not wait for Python's lock
try:
    for step, hand_over in enumerate(itertools.cycle(kinds)):
        hand_over(f"operation.{step}", step)
        if step > 2000:  # enough for Horovod's thread to be at it for long; more make it slow
            time.sleep(1e-4)
except HorovodInternalError:
    print("told", flush=True)
"""


def test_a_rank_that_hands_over_operations_learns_that_another_one_has_ended() -> None:
    command = [*horovodrun(2), sys.executable, "-c", HANDS_OVER]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "told" in done.stdout, done.stderr
