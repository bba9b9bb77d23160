# shellcheck shell=bash
# What the scripts of launch/ and benchmarks/ and the batch scripts share. Sourced, never run.
#
# The package brings it, for `hva slurm`; launch/lib/common.sh is a link to it.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
program=$(basename "$0")

say() { printf '%s\n' "$*"; }

# die MESSAGE [REMEDY...]: what was wrong, then one remedy a line, and no further.
die() {
    printf '%s: %s\n' "$program" "$1" >&2
    shift
    local remedy
    for remedy in "$@"; do printf '    %s\n' "$remedy" >&2; done
    exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }

# Prints the comment at the top of the calling script: it is the manual.
usage() { sed -n '2,/^[^#]/{/^#/!q; s/^# \{0,1\}//; p}' "$0"; }

# Sets env_dir to the Python environment to use, and python to its interpreter. An active environment
# that has torch is the user's choice (a cluster's own build, say); any other means .venv in this repository.
# shellcheck disable=SC2034
find_environment() {
    local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
    env_dir=$root/.venv
    if [[ -n $active && ! $active -ef $env_dir ]] && has_torch "$active/bin/python"; then
        env_dir=$active
    fi
    python=$env_dir/bin/python
}

# Looks the module up without importing it: the import alone takes a second or two.
has_torch() { [[ -x $1 ]] && "$1" -c 'import importlib.metadata as m; m.version("torch")' >/dev/null 2>&1; }

# The cores that this process may use. nproc would answer with OMP_NUM_THREADS where that is set.
count_cores() { env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc; }

# set_default NAME VALUE: in the environment, unless it is there; assignments lists what was set.
assignments=()
set_default() {
    [[ -z ${!1+set} ]] || return 0
    export "$1=$2"
    assignments+=("$1=$2")
}

# set_rank_defaults THREADS HOSTS: what ranks want, so many threads each, whoever starts them.
set_rank_defaults() {
    set_default OMP_NUM_THREADS "$1"
    set_default NUMBA_NUM_THREADS "$1"
    # Horovod would wait for a rank that stalls forever.
    set_default HOROVOD_STALL_SHUTDOWN_TIME_SECONDS 300
    # mpirun would kill ranks a second after it told them to end: too soon to save a model.
    set_default OMPI_MCA_odls_base_sigkill_timeout 5
    if (($2 > 1)); then
        # Rings; Open MPI's defaults are far slower over TCP: its allgather takes 1.6 times as long.
        set_default OMPI_MCA_coll_tuned_use_dynamic_rules 1
        set_default OMPI_MCA_coll_tuned_allreduce_algorithm 4
        set_default OMPI_MCA_coll_tuned_allgatherv_algorithm 3
    fi
}

# The processes that one has started, one per line; descendants has theirs, too.
children() { cat "/proc/$1/task/"*/children 2>/dev/null || true; }

descendants() {
    local child
    for child in $(children "$1"); do
        say "$child"
        descendants "$child"
    done
}

# kill_tree PROCESS: kills it and all that it has started, also what it starts meanwhile.
kill_tree() {
    local before='' now=$1
    # A stopped process starts nothing more; one that was about to has a child that only the next look finds.
    until [[ $now == "$before" ]]; do
        before=$now
        # shellcheck disable=SC2086
        kill -s STOP $before 2>/dev/null || true
        now=$(say "$1" && descendants "$1")
        now=${now//$'\n'/ }
    done
    # shellcheck disable=SC2086
    kill -s KILL $now 2>/dev/null || true
}
