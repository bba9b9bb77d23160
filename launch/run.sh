#!/usr/bin/env bash
# Trains with several ranks: sets up what is missing, then starts launch/train.py under horovodrun.
#
#     launch/run.sh [-np N] [-H host:slots,...] [--dry-run] [train.py's options]
#     launch/run.sh --netlab N,RATE[,RATE...] [--netlab-trace TRACE] [--dry-run] [train.py's options]
#
#     -np N       the number of ranks (default: all slots of -H, otherwise one a core, at least 2, at most 4)
#     -H HOSTS    where they run, as for horovodrun: host1:4,host2:4 (default: here); no slots mean 1
#     --netlab    on N hosts with slow links that are made on this machine for this run, one rank on each; needs
#                 root. All links have one rate, or each its own: --netlab 4,200mbit or --netlab 2,1gbit,50mbit
#     --netlab-trace TRACE   how the rates change meanwhile, in one word: 'sin2 --low 50mbit --high 400mbit', or
#                 what launch/netlab.sh --help has besides
#     --dry-run   print the command and stop; nothing is set up
#     --          everything after it is train.py's
#
# All other options are train.py's: launch/run.sh --help lists them as well, once the setup is done. Without one
# that says how gradients are exchanged (--compression, --planner, --distributed, ...), --compression auto is
# added: what to compress, and whether to, is then decided while a small model trains.
#
# The command is printed with what it sets in the environment, so that it can be pasted and changed. A variable
# that is set already is left alone:
#     OMPI_MCA_mpi_yield_when_idle=1   more ranks than cores: a waiting rank must not keep its core
#     OMPI_MCA_coll_tuned_*            several hosts: rings; Open MPI's defaults are far slower over TCP
#     OMPI_MCA_odls_base_sigkill_timeout=5   seconds that ranks have to save a checkpoint when mpirun ends them
#     OMP_NUM_THREADS, NUMBA_NUM_THREADS   this host's cores divided by its ranks
#     HOROVOD_CYCLE_TIME=0.2           a core for each rank and one to spare: look for work more often than each ms
# horovodrun passes the whole environment on to every host, and binds no rank to a core.
#
# SIGHUP (the terminal is closed), SIGINT (Ctrl-C), SIGTERM and SIGUSR1 end all ranks at the same step, after a
# checkpoint if train.py has a --checkpoint-dir; the exit status is then 129, 130, 143 or 75. A second Ctrl-C ends
# them at once. With nohup before the command, the training continues when the terminal is closed.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

# host1:4,host2:4 -> one line a host: its slots.
slots() {
    local host
    for host in ${1//,/ }; do say "${host#*:}"; done
}

# Over all hosts, or (the ranks fill one host before the next) the most that one host gets.
sum_of_slots() { slots "$1" | awk '{ n += $1 } END { print n }'; }
most_slots() { slots "$1" | sort -n | tail -n 1; }
number_of_hosts() { slots "$1" | wc -l; }

default_ranks() {
    if [[ -n $hosts ]]; then
        sum_of_slots "$hosts"
        return
    fi
    local cores
    cores=$(count_cores)
    ((cores > 4)) && cores=4
    ((cores < 2)) && cores=2
    say "$cores"
}

ranks_per_host() {
    local most=$ranks
    # The hosts of a netlab are all on this machine.
    if [[ -n $hosts && -z $netlab ]]; then
        most=$(most_slots "$hosts")
        ((most > ranks)) && most=$ranks
    fi
    say "$most"
}

set_environment() {
    local cores local_ranks threads
    cores=$(count_cores)
    local_ranks=$(ranks_per_host)
    threads=$((cores / local_ranks))
    ((threads >= 1)) || threads=1
    set_rank_defaults "$threads" "$(number_of_hosts "${hosts:-here:1}")"
    if ((local_ranks > cores)); then
        set_default OMPI_MCA_mpi_yield_when_idle 1
    elif ((local_ranks < cores)); then
        set_default HOROVOD_CYCLE_TIME 0.2
    fi
}

has_open_mpi_4() { [[ $(mpirun --version 2>/dev/null) == *"(Open MPI) 4."* ]]; }

parse_arguments() {
    ranks='' hosts='' netlab='' netlab_trace='' dry_run='' arguments=()
    while (($#)); do
        case $1 in
            # --np is mpirun's name of it, --num-proc horovodrun's.
            -np | --np | --num-proc | -H)
                (($# > 1)) || die "$1 needs a value" "For example: $program -np 4"
                if [[ $1 == -H ]]; then set_hosts "$2"; else set_ranks "$2"; fi
                shift
                ;;
            --netlab | --netlab-trace)
                (($# > 1)) || die "$1 needs a value" "For example: $program --netlab 4,200mbit"
                if [[ $1 == --netlab ]]; then netlab=$2; else netlab_trace=$2; fi
                shift
                ;;
            --dry-run) dry_run=yes ;;
            -h | --help) help=yes ;;
            --)
                shift
                arguments+=("$@")
                break
                ;;
            # train.py has long options only, so this one was meant for a launcher.
            -[!-]*)
                [[ $1 =~ ^-[0-9.] ]] || die "unknown option '$1'" "Its own are -np N, -H HOSTS, --dry-run and --help;" \
                    "train.py's all start with --. For others of horovodrun, paste what --dry-run prints and add them."
                arguments+=("$1")
                ;;
            *) arguments+=("$1") ;;
        esac
        shift
    done
    check_netlab
    [[ -n $ranks ]] || ranks=$(default_ranks)
}

# As many digits as any cluster needs, and bash can count with.
number='[1-9][0-9]{0,5}'

set_ranks() {
    [[ $1 =~ ^$number$ ]] || die "-np must be a positive number, not '$1'" "It can be 1 to 999999: $program -np 4"
    ranks=$1
}

# Sets hosts, each with its slots. What is let through here becomes part of a shell's command in horovodrun.
set_hosts() {
    local LC_ALL=C rest=$1, host
    hosts=''
    while [[ -n $rest ]]; do
        host=${rest%%,*} rest=${rest#*,}
        [[ $host =~ ^[A-Za-z0-9_][A-Za-z0-9_.-]*(:$number)?$ ]] ||
            die "-H must be like host1:4,host2:4, not '$1': '$host' is no host with its slots" \
                "A name has letters, digits, '-', '_' and '.'; the slots are a number from 1 to 999999."
        [[ $host == *:* ]] || host+=:1
        hosts+=,$host
    done
    hosts=${hosts#,}
}

check_netlab() {
    if [[ -z $netlab ]]; then
        [[ -z $netlab_trace ]] || die "--netlab-trace goes with --netlab" "For example: $program --netlab 4,200mbit"
        return
    fi
    [[ $netlab =~ ^([1-9][0-9]{0,2})(,[0-9.]+[kmgKMG]?bit)+$ ]] ||
        die "--netlab must be like 4,200mbit or 2,1gbit,50mbit, not '$netlab'"
    [[ -z $ranks$hosts ]] || die "--netlab brings its own hosts, with a rank on each: without -np and -H"
    hosts=$(seq -s , -f 'h%g:1' "${BASH_REMATCH[1]}")
    # Now, not after minutes of setup.
    ((EUID == 0)) || [[ -n $dry_run || -v help ]] ||
        die "--netlab needs root, to make network namespaces" "sudo -E $0 --netlab $netlab ..."
}

show_help() {
    usage
    if [[ -x $python && -f $root/launch/train.py ]]; then
        say
        "$python" "$root/launch/train.py" --help || true
    fi
}

# ---------------------------------------------------------------- signals

# The processes of this run on this host, one per line; also those whose parents have ended.
processes() { { grep -lzsxF "$mark" /proc/[0-9]*/environ || true; } | cut -d / -f 3; }

is_called() { [[ $(cat "/proc/$1/comm" 2>/dev/null) =~ ^($2) ]]; }

# Not the one that horovodrun asks for its version.
mpiruns() {
    local process
    for process in $(processes); do
        if is_called "$process" 'mpirun|orterun|mpiexec' && ! grep -qszxFe --version "/proc/$process/cmdline"; then
            say "$process"
        fi
    done
}

# tell_ranks SIGNAL: send it to the ranks on this host, or, if there are none, to mpirun. One rank that is told
# tells the others (see train.py --help), so that all of them end together.
tell_ranks() {
    local process rank heard
    for process in $(mpiruns); do
        heard=''
        for rank in $(children "$process"); do
            if is_called "$rank" python && kill -s "$1" "$rank"; then heard=yes; fi
        done
        [[ -n $heard ]] || kill -s "$1" "$process" || true
    done
}

# train.py's at each signal that it listens to.
declare -A status_after=([HUP]=129 [INT]=130 [TERM]=143 [USR1]=75)

# on_signal NAME: called by traps only, which shellcheck does not see.
# shellcheck disable=SC2317,SC2329
on_signal() {
    interrupted=yes
    job=${!:-}
    [[ -n $job ]] || exit "${status_after[$1]}"
    local again=$told
    # Shell and kernel may both send one for a closed terminal, and at a second one mpirun kills its ranks.
    if [[ $1 == HUP && -n $again ]]; then return 0; fi
    told=yes
    status_of_signal=${status_after[$1]}
    if [[ -z $(mpiruns) ]]; then
        # Only horovodrun, or a netlab that is still being made, or removed. In its imports, either would answer
        # SIGINT with a traceback.
        if [[ -n $netlab ]]; then kill -s TERM "$job"; else kill -s TERM -- "-$job"; fi || true
    elif [[ $1 == INT && -n $again && -z $netlab ]]; then
        kill -s INT -- "-$job" || true # Ctrl-C once more: now
    else
        # SIGINT, too: mpirun would pass it on as SIGTERM, and kill ranks that take long to save a checkpoint.
        tell_ranks "$1"
    fi
}

# Not by exec: SIGTERM and SIGUSR1, as batch systems send them, and SIGHUP, when a terminal is closed, would end
# horovodrun alone, and its ranks would train on. Ctrl-C goes to all of them, as it would without this script.
run_to_the_end() {
    local status signal interrupted=yes told='' status_of_signal=''
    mark=HVA_LAUNCH=$$.$(date +%s%N)
    # Under nohup SIGHUP is ignored, and stays so.
    for signal in "${!status_after[@]}"; do
        # shellcheck disable=SC2064
        trap "on_signal $signal" "$signal"
    done
    # Bash's line about a job that was killed may be the first that nobody reads.
    trap : PIPE
    set -m # a process group of its own; without it the job would be deaf to Ctrl-C
    env "$mark" "$@" &
    set +m
    # A signal ends the wait, not the job.
    while [[ -n $interrupted ]]; do
        interrupted='' status=0
        wait "$!" || status=$?
    done
    # 1 is what mpirun says that had no ranks yet, and a rank whose Python was still loading.
    [[ -z $told ]] || ((status != 143 && status != 1)) || status=$status_of_signal
    end_the_rest
    ((status != 0)) || [[ -z $shows_next ]] || show_what_is_next
    exit "$status"
}

# horovodrun alone may have been killed, or together with this script.
end_the_rest() {
    local tries
    [[ -n $told ]] || tell_ranks TERM
    # As long as mpirun lives, it sees to the end of its ranks.
    while [[ -n $(mpiruns) ]]; do sleep 0.2; done
    for ((tries = 0; tries < 50; tries++)); do
        [[ -n $(processes) ]] || return 0
        sleep 0.2
    done
    # shellcheck disable=SC2046
    kill -s KILL $(processes) || true
}

# Whether train.py's options say how gradients are exchanged.
exchange_is_given() {
    local argument
    for argument in ${arguments[@]+"${arguments[@]}"}; do
        case ${argument%%=*} in
            --compression | --override | --feedback | --scheme | --planner | --candidate | --distributed) return 0 ;;
            --dense-steps | --compression-warmup-steps) return 0 ;;
        esac
    done
    return 1
}

show_what_is_next() {
    local slow='launch/run.sh --netlab 4,200mbit'
    ((EUID == 0)) || slow="sudo -E $slow"
    say
    say "where to look next:"
    say "  $(printf %-40s "$slow")   the same over slow links, where compression pays"
    say "  launch/run.sh --logdir runs/first          and then: $hva report runs/first"
    say "  docs/auto.md                               how it decides, and within which limits"
    say "  README.md                                  the lines that your own script needs"
}

main() {
    parse_arguments "$@"
    local shows_next=
    if ! exchange_is_given; then
        [[ -n $netlab ]] || shows_next=yes
        arguments=(--compression auto ${arguments[@]+"${arguments[@]}"})
    fi
    find_environment
    if [[ -v help ]]; then
        show_help
        exit
    fi
    if [[ -z $dry_run ]]; then
        "$root/launch/setup.sh" --quiet
        # The first setup.sh has only now made .venv.
        find_environment
    fi
    set_environment

    local folder=$root/launch
    [[ ! $PWD -ef $root ]] || folder=launch
    local -a command=(horovodrun -np "$ranks")
    if [[ -n $netlab ]]; then
        command=("$folder/netlab.sh" run "${netlab%%,*}" "${netlab#*,}")
        [[ -z $netlab_trace ]] || command+=(--trace "$netlab_trace")
        command+=(--)
        # train.py would give each host all the cores.
        arguments=(--threads "$OMP_NUM_THREADS" ${arguments[@]+"${arguments[@]}"})
    else
        [[ -z $hosts ]] || command+=(-H "$hosts")
        # horovodrun has it put the rank before, and at times behind, each line; only rank 0 prints.
        if has_open_mpi_4; then command+=(--mpi-args='-mca orte_tag_output 0'); fi
    fi
    command+=(python "$folder/train.py" ${arguments[@]+"${arguments[@]}"})

    local shown='' hva=hva
    if [[ $(command -v hva) != "$env_dir/bin/hva" ]]; then hva=$env_dir/bin/hva; fi
    if [[ $(command -v python) != "$python" || $(command -v horovodrun) != "$env_dir/bin/horovodrun" ]]; then
        shown="PATH=$(printf '%q' "$env_dir/bin"):\$PATH "
        export PATH=$env_dir/bin:$PATH
    fi
    shown+=$(printf '%q ' ${assignments[@]+"${assignments[@]}"} "${command[@]}")
    say "${shown% }"
    [[ -z $dry_run ]] || exit 0
    run_to_the_end "${command[@]}"
}

main "$@"
