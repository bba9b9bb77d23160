"""The commands of netlab.sh, whose head is their manual."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from .base import (
    MOST_HOSTS,
    SUBNET,
    Lab,
    LabError,
    UsageError,
    address,
    change_rate,
    default_name,
    down,
    find,
    iproute,
    parse_rate,
    processes_in,
    require_tools,
    show_rate,
    signals_held,
    tracers,
    up,
)
from .jobs import Interrupted, handle_signals, interrupt, mpirun, require_open_mpi, run_on
from .probe import Measured, probe
from .trace import parse_trace, replay

PROGRAM = Path(__file__).parents[1] / "start_netlab.py"

# A command checks its words and returns what is then done as root, with an exit status.
Action = Callable[[], int]


def main(words: Sequence[str]) -> int:
    try:
        action = parse(list(words))
        require_tools()
        handle_signals(interrupt)
        return action()
    except LabError as trouble:
        print(f"netlab.sh: {trouble}", *trouble.remedies, sep="\n    ", file=sys.stderr)
        return trouble.status
    except BrokenPipeError:
        # Whoever read this has seen enough. Python would complain once more, at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"netlab.sh: {error}", file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        return interrupted.status


def parse(words: list[str]) -> Action:
    given = None
    if words[:1] == ["--name"]:
        if len(words) < 2:
            raise UsageError("--name needs a value")
        given, words = words[1], words[2:]
    if not words or words[0] not in COMMANDS:
        wrong = f"unknown command '{words[0]}'" if words else "no command"
        raise UsageError(wrong, f"Known are {', '.join(COMMANDS)} and --help.")
    command, *rest = words
    if command == "run":
        # A lab for this alone, whatever lab the user may have up.
        name = given or f"run-{secrets.token_hex(3)}"
    else:
        name = given or os.environ.get("HVA_NETLAB") or default_name()
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}", name) is None:
        raise UsageError(
            f"'{name}' is no name for a lab", "Use at most 40 letters, digits and -, _ or ."
        )
    return COMMANDS[command](name, rest)


def require_count(words: Sequence[str], least: int, most: int | None, form: str) -> None:
    if len(words) < least or (most is not None and len(words) > most):
        raise UsageError(f"write: netlab.sh {form}")


def parse_rates(number: str, rates: str) -> list[int]:
    """One for each host, also where one for all was given."""
    if re.fullmatch(r"\d{1,4}", number) is None or not 1 <= int(number) <= MOST_HOSTS:
        raise UsageError(f"'{number}' is no number of hosts", f"From 1 to {MOST_HOSTS} is possible.")
    parsed = [parse_rate(rate) for rate in rates.split(",")]
    if len(parsed) not in (1, int(number)):
        raise UsageError(
            f"{len(parsed)} rates for {number} hosts", "Give one for all, or one for each host."
        )
    return parsed if len(parsed) > 1 else parsed * int(number)


def describe(lab: Lab) -> str:
    rates = {show_rate(rate): None for rate in lab.rates.values()}
    return f"lab '{lab.name}': {len(lab.rates)} hosts, h1 to h{len(lab.rates)}, at {', '.join(rates)}"


# ---------------------------------------------------------------- the commands


def command_up(name: str, words: Sequence[str]) -> Action:
    require_count(words, 2, 2, "up N RATE[,RATE...]")
    rates = parse_rates(*words)

    def act() -> int:
        print(describe(up(name, rates)))
        return 0

    return act


def command_rate(name: str, words: Sequence[str]) -> Action:
    require_count(words, 1, None, "rate RATE [HOST...]")
    rate = parse_rate(words[0])

    def act() -> int:
        change_rate(name, rate, words[1:])
        return 0

    return act


def command_exec(name: str, words: Sequence[str]) -> Action:
    require_count(words, 2, None, "exec HOST COMMAND...")
    return lambda: run_on(find(name), words[0], words[1:])


def command_mpirun(name: str, words: Sequence[str]) -> Action:
    require_count(words, 1, None, "mpirun ARGUMENTS...")
    return lambda: mpirun(find(name), words)


def command_trace(name: str, words: Sequence[str]) -> Action:
    require_count(words, 1, None, "trace FILE|sin2 [OPTIONS]")
    trace = parse_trace(words)

    def act() -> int:
        replay(name, trace)
        return 0

    return act


def command_probe(name: str, words: Sequence[str]) -> Action:
    require_count(words, 0, 1, "probe [--json]")
    if words and words[0] != "--json":
        raise UsageError(f"unknown option '{words[0]}'", "probe knows --json only.")

    def act() -> int:
        measured = probe(find(name))
        if words:
            print(json.dumps([asdict(link) for link in measured]))
        else:
            show_measured(measured)
        return 0

    return act


def show_measured(measured: Sequence[Measured]) -> None:
    print(f"{'host':<6}{'shaped':>10}{'to host':>12}{'':8}{'from host':>12}")
    for link in measured:
        print(f"{link.host:<6}{show_rate(link.shaped):>10}", end="")
        for rate in (link.to_host, link.from_host):
            print(f"{show_rate(rate):>12}{rate / link.shaped:>7.1%} ", end="")
        print("" if link.within_a_tenth else " <- off", flush=True)
    if not all(link.within_a_tenth for link in measured):
        print(
            "netlab.sh: what is marked 'off' is not within 10 % of its rate: the machine is busy with"
            " something else, or this is more than its cores can carry",
            file=sys.stderr,
        )


def command_status(name: str, words: Sequence[str]) -> Action:
    require_count(words, 0, 0, "status")

    def act() -> int:
        lab = find(name)
        print(f"{describe(lab)} ({SUBNET})")
        if replaying := tracers(lab):
            print(f"a trace is replayed by process {replaying[0]}")
        now = {
            qdisc["dev"]: 8 * qdisc["options"]["rate"]
            for qdisc in json.loads(iproute("tc", "-n", lab.switch, "-j", "qdisc", "show"))
            if qdisc["kind"] == "tbf"
        }
        widest = max(map(len, lab.namespaces))
        head = f"{'host':<6}{'address':<14}{'rate':>10}{'now':>12}{'processes':>11}"
        print(f"{head}  {'namespace':<{widest}}  cores")
        for host, rate in lab.rates.items():
            busy = len(processes_in([lab.namespace(host)]))
            print(
                f"{host:<6}{address(host):<14}{show_rate(rate):>10}{show_rate(now[host]):>12}", end=""
            )
            print(f"{busy:>11}  {lab.namespace(host):<{widest}}  {lab.cores.get(host, 'all')}")
        return 0

    return act


def command_down(name: str, words: Sequence[str]) -> Action:
    require_count(words, 0, 0, "down")

    def act() -> int:
        print(f"lab '{name}': {'removed' if down(name) else 'was not up'}")
        return 0

    return act


def command_run(name: str, words: Sequence[str]) -> Action:
    form = "run N RATE[,RATE...] [--trace TRACE] -- ARGUMENTS..."
    if "--" not in words:
        raise UsageError(f"write: netlab.sh {form}")
    split = words.index("--")
    options, arguments = words[:split], words[split + 1 :]
    require_count(arguments, 1, None, form)
    if len(options) not in (2, 4) or options[2:3] not in ([], ["--trace"]):
        raise UsageError(f"write: netlab.sh {form}")
    rates = parse_rates(*options[:2])
    trace = shlex.split(options[3]) if len(options) == 4 else []
    if trace:
        # Only to refuse it before anything is made.
        Lab(name, {f"h{number}": rate for number, rate in enumerate(rates, start=1)}).require_hosts(
            parse_trace(trace).hosts
        )
    return lambda: run(name, rates, trace, arguments)


def run(name: str, rates: Sequence[int], trace: Sequence[str], arguments: Sequence[str]) -> int:
    """A job in a lab of its own; returns its exit status."""
    require_open_mpi()
    with contextlib.ExitStack() as stack:
        with signals_held():
            lab = up(name, rates)
            # Not before up: a lab of this name that was there already is somebody else's.
            stack.callback(down, name)
        print(describe(lab))
        show_measured(probe(lab))
        if not trace:
            return mpirun(lab, arguments)
        command = [sys.executable, str(PROGRAM), "--name", name, "trace", *trace]
        # It is down that ends it. What it sets is for --log to keep.
        replaying = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        return mpirun(lab, arguments, keep=[replaying.pid])


COMMANDS = {
    "up": command_up,
    "rate": command_rate,
    "exec": command_exec,
    "mpirun": command_mpirun,
    "trace": command_trace,
    "probe": command_probe,
    "status": command_status,
    "down": command_down,
    "run": command_run,
}
