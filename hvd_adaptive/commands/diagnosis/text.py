"""The report of ``hva doctor``, to be read and to be pasted into an issue."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from hvd_adaptive.commands.diagnosis.checks import Finding, fails
from hvd_adaptive.commands.diagnosis.facts import Facts, RankFacts

MARKS = {"failure": "FAIL", "slow": "SLOW", "note": "note"}


def as_json(facts: Facts, findings: Mapping[str, Finding]) -> str:
    """All facts and findings."""
    return json.dumps(
        {
            "facts": asdict(facts),
            "findings": {name: asdict(finding) for name, finding in findings.items()},
            "training_would_fail": fails(findings.values()),
        },
        indent=1,
    )


def as_text(facts: Facts, findings: Mapping[str, Finding]) -> str:
    """Versions, hosts, links and findings, each with what to write."""
    hosts = len(facts.topology.nodes)
    version, ranks = facts.first.versions["hvd_adaptive"], _many(len(facts.ranks), "rank")
    title = f"hva doctor: hvd_adaptive {version} on {ranks} and {_many(hosts, 'host')}"
    rows = [f"  {name:<12} {text}" for name, text in _rows(facts)]
    return "\n".join([title, "", *rows, "", *_findings(findings)])


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    rank = facts.first
    versions = rank.versions
    yield "python", versions["python"]
    gpus = f", {_many(rank.gpus, 'GPU')}" if rank.cuda else ""
    yield (
        "torch",
        f"{versions['torch']}, {_many(rank.torch_threads, 'thread')}, CUDA {rank.cuda or 'none'}{gpus}",
    )
    built = ", ".join(name for name, there in rank.builds.items() if there)
    made = f", built with torch {rank.horovod_torch}" if rank.horovod_torch else ""
    yield "horovod", f"{versions['horovod']}{' with ' * bool(built)}{built}{made}"
    yield "mpirun", rank.mpirun or "none"
    yield "mpi4py", f"{versions['mpi4py']} on {rank.mpi or 'no MPI'}"
    yield (
        "numba",
        f"{versions['numba']}, {_many(rank.numba_threads, 'thread')}, numpy {versions['numpy']}",
    )
    state = "compiled" if rank.precompiled else "not compiled yet"
    yield "kernels", f"{state}, in {rank.kernels or 'no folder'}"
    started = rank.launcher or "no launcher"
    yield "started by", f"{started}, {_many(rank.launched_size, 'rank')}; Horovod sees {rank.size}"
    for host in facts.topology.nodes:
        yield "host", _host(facts, host)
    if facts.operations:
        yield "operations", facts.operations
    for link in facts.links:
        between = f"{link.hosts[0]} - {link.hosts[1]}"
        yield "link", f"{between}: {1e3 * link.latency:.3g} ms, {link.rate / 1e6:,.0f} Mbit/s"
    for name, text in sorted(rank.variables.items()):
        yield "set", f"{name}={text}"


def _host(facts: Facts, name: str) -> str:
    numbers = [number for number, rank in enumerate(facts.ranks) if rank.host == name]
    ranks: list[RankFacts] = [facts.ranks[number] for number in numbers]
    cores = facts.cores(ranks[0])
    local = facts.local_ranks(ranks[0])
    speed = min(rank.memcpy for rank in ranks) / 1e9
    which = f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {numbers[0]} to {numbers[-1]}"
    share = f"{_many(cores, 'core')} ({cores / local:.2g} per rank)"
    return f"{name}: {which}, {share}, memcpy {speed:.1f} GB/s"


def _findings(findings: Mapping[str, Finding]) -> Iterator[str]:
    for name, finding in findings.items():
        yield f"  {MARKS[finding.severity]} {name:<10} {finding.what}"
        yield f"       {'':<10} -> {finding.remedy}"
    if fails(findings.values()):
        yield "Training would fail."
    elif findings:
        yield f"Training would work; {_many(len(findings), 'finding')}."
    else:
        yield "Nothing was found."


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
