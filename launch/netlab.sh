#!/usr/bin/env bash
# Several hosts with slow links on one machine: network namespaces, joined by a bridge, each link shaped by tc.
#
#     launch/netlab.sh [--name NAME] COMMAND
#
#     up N RATE[,RATE...]    make N hosts h1..hN, all with one rate or each with its own: up 3 200mbit,200mbit,50mbit
#     rate RATE [HOST...]    change the rate of these hosts' links (default: of all), while jobs run
#     exec HOST COMMAND...   run a command on a host; its exit status is the command's
#     mpirun ARGUMENTS...    Open MPI's mpirun on h1, with a slot on each host; its exit status is the job's
#     trace TRACE            replay a bandwidth trace until it ends or is stopped, then restore the rates; see below
#     probe [--json]         measure the rate of each link with TCP and compare it with what it is shaped to
#     status                 show the hosts, their rates, how many processes they run, and on which cores
#     down                   end what runs on the hosts and remove all of it, also what a killed up left behind
#     run N RATE[,RATE...] [--trace TRACE] -- ARGUMENTS...
#                            up, probe, mpirun ARGUMENTS, and whatever happens down; each run is a lab of its own
#
# RATE is tc's: 12.5mbit, 1gbit; at least 1mbit. A link has the same rate in both directions, and TCP gets 95 % of it: the
# rest are headers. Above about 1gbit, and with many busy hosts below, the machine's cores are the limit: probe tells.
# Latency is not simulated. Each host keeps to its share of the machine's cores; where these cannot be shared out evenly,
# any host may use any.
#
# TRACE is one of
#     FILE                   CSV rows "seconds,rate" or "seconds,rate,host", by rising seconds
#     sin2 --low RATE --high RATE [--period 20] [--noise 0] [--seed 0] [--every 0.5]
#                            low + (high - low) * sin^2(pi * t / period), in equal intervals; times 1 + noise * a normal
#                            variate
#   with
#     --seconds S            end after S seconds (default: a FILE where its last row has lasted as long as the one
#                            before; sin2 when stopped)
#     --loop                 begin a FILE again at its end
#     --host HOST            for this host's link only (default: all)
#     --log FILE             write there what was set and when, as CSV, instead of to the standard output
#
# Labs are apart from each other and from the machine's own network. Each has a name: --name, or HVA_NETLAB in the
# environment, or one made of the user and this folder. Commands on a host see it as their hostname, reach the
# others by name, and reach nothing else. Needs root, and Linux with iproute2.
#
#     sudo -E launch/netlab.sh up 4 200mbit
#     sudo -E launch/netlab.sh mpirun python launch/train.py --steps 50
#     sudo -E launch/netlab.sh trace sin2 --low 50mbit --high 400mbit --noise 0.05 --seconds 60
#     sudo -E launch/netlab.sh down
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

main() {
    case ${1-} in
        -h | --help) usage; exit ;;
        '')
            usage >&2
            exit 2
            ;;
    esac
    find_environment
    # So that "exec h1 python" and "mpirun python" mean the environment that launch/setup.sh has made.
    [[ ! -x $python || $(command -v python) == "$python" ]] || export PATH=$env_dir/bin:$PATH
    have python3 || die "python3 is missing" "On Debian or Ubuntu: sudo apt-get install python3"
    exec python3 "$root/launch/start_netlab.py" "$@"
}

main "$@"
