"""``hva doctor``: versions, hosts and links, and what would make training fail or slow."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import threading
from typing import Any, Final

from hvd_adaptive.commands.diagnosis import checks, facts, text
from hvd_adaptive.commands.diagnosis.facts import Facts, Link, RankFacts

SECONDS_TO_START: Final = 60.0
"""After which Horovod has not started: hosts do not reach each other, or a rank is missing."""

EPILOG: Final = """\
Rank 0 prints the report, which can be pasted into an issue: it has names of hosts, versions and
settings. FAIL: training would fail; SLOW: it would be slower than it need be; each with what to write.

Exit status: 0, or 1 where training would fail.

examples:
  hva doctor
  horovodrun -np 4 -H red:2,green:2 hva doctor
  srun --mpi=pmix hva doctor --json > report.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = "Report versions, hosts and links, and what would make training fail or slow."
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="print everything that was seen, as JSON")
    parser.add_argument(
        "--slow-link", type=float, default=1000.0, metavar="MBIT",
        help="report links between hosts that are slower (default: %(default)g)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Look, measure, judge, and print on rank 0."""
    mine = facts.collect()
    hvd, mine = _start(mine)
    shown = mine.launched_rank == 0
    everyone: tuple[RankFacts, ...] = (mine,)
    measured: dict[str, Any] = {}
    if hvd is not None and hvd.size() > 1:
        everyone, measured = _together(mine)
        shown = hvd.rank() == 0
    found = Facts(everyone, slow_rate=1e6 * options.slow_link, **measured)
    findings = checks.examine(found)
    if shown:
        render = text.as_json if options.json else text.as_text
        print(render(found, findings), flush=True)
    return int(checks.fails(findings.values()))


def _start(mine: RankFacts) -> tuple[Any, RankFacts]:
    """Horovod's module, started, or None; and what is known then."""
    try:
        hvd = _import()
    except (ImportError, OSError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return None, dataclasses.replace(mine, horovod_error=reason, **facts.of_mpi())
    late = threading.Timer(SECONDS_TO_START, _give_up, [mine])
    late.daemon = True
    late.start()
    try:
        from hvd_adaptive.comm.startup import init

        init()
    except Exception as error:  # whatever it is, it is what the report is for
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return None, dataclasses.replace(mine, horovod_error=reason, **facts.of_mpi())
    finally:
        late.cancel()
    return hvd, dataclasses.replace(mine, **facts.of_horovod(hvd), **facts.of_mpi())


def _import() -> Any:
    """``horovod.torch``; it prints, and hides, why its library cannot be loaded."""
    import horovod.torch as hvd

    if not hasattr(hvd, "init"):
        from horovod.torch import mpi_lib_v2  # noqa: F401 (raises what Horovod has printed)

        raise ImportError("horovod.torch has no init")
    return hvd


def _give_up(mine: RankFacts) -> None:
    if mine.launched_rank == 0:
        reason = f"hvd.init() did not return within {SECONDS_TO_START:.0f} s"
        found = Facts((dataclasses.replace(mine, horovod_error=reason),))
        print(text.as_text(found, checks.examine(found)), flush=True)
        print("Do the hosts reach each other? Try: mpirun -np 2 -H HOST1,HOST2 hostname", flush=True)
    sys.stdout.flush()
    os._exit(1)


def _together(mine: RankFacts) -> tuple[tuple[RankFacts, ...], dict[str, Any]]:
    """What all ranks see, and what lies between them."""
    import horovod.torch as hvd

    from hvd_adaptive.comm.horovod_transport import HorovodTransport
    from hvd_adaptive.comm.process_set_control import ProcessSetControl
    from hvd_adaptive.comm.topology import Topology
    from hvd_adaptive.commands.diagnosis.probe import measure_links

    control = ProcessSetControl("hva.doctor.control")
    everyone = tuple(map(RankFacts.of_message, control.allgather(mine.as_message())))
    transport = HorovodTransport(hvd.Average, hvd.global_process_set)
    costs = transport.link_costs("hva.doctor")
    topology = Topology(tuple(rank.host for rank in everyone))
    links: tuple[Link, ...] = measure_links(transport, control, topology)
    return everyone, {"operations": str(costs), "latency": costs.allgather, "links": links}
