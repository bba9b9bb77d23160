# shellcheck shell=bash
# What the batch scripts of this folder share. Sourced, never run.
#
# run_job and run_sweep are what they call. The rest, in order: what Slurm gave, the environment, the launcher,
# the folder, what is said and checked before the start, signals, the run, its end.

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/shell.sh"
# As it was named: in a clone this is launch/slurm, which is a link. What `hva slurm` wrote has no repository.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${here%/launch/slurm}
program=${SLURM_JOB_NAME:-$program}
# Whatever fails without a message of its own still says where.
set -E
trap 'printf "%s: line %s of %s failed with %s\n" "$program" "$LINENO" "${BASH_SOURCE[0]}" "$?" >&2' ERR

# EX_TEMPFAIL: what train.py ends with when it was stopped by USR1 and can continue later.
try_later=75

# ---------------------------------------------------------------- what Slurm gave

require_batch_job() {
    case ${1-} in -h | --help) usage; exit ;; esac
    [[ -n ${SLURM_JOB_ID:-} && -n ${SLURM_JOB_NODELIST:-} && -z ${SLURM_STEP_ID:-} ]] ||
        die "this is a batch script, and Slurm did not start it" \
            "Submit it: sbatch $0. Its manual: bash $0 --help"
}

# 2(x3),1 -> 2 2 2 1, one per line.
expand_counts() {
    local part times
    for part in ${1//,/ }; do
        times=1
        [[ $part =~ \(x([0-9]+)\)$ ]] && times=${BASH_REMATCH[1]}
        for ((; times > 0; times--)); do say "${part%%(*}"; done
    done
}

read_allocation() {
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    mapfile -t tasks < <(expand_counts "$SLURM_TASKS_PER_NODE")
    # Without --ntasks it is what the nodes have; --ntasks-per-node is then but the most of a node.
    ranks=${SLURM_NTASKS:-$(($(IFS=+ && say "${tasks[*]}")))}
    # The number alone would be all tasks of an array, if it is the array's own.
    job=$SLURM_JOB_ID
    [[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
}

# ---------------------------------------------------------------- environment

# A batch shell is no login shell: "module" may have to be defined first.
load_modules() {
    [[ -n ${HVA_MODULES:-} ]] || return 0
    local file name
    # Neither Lmod's nor Environment Modules' code expects set -u.
    set +u
    for file in "${MODULESHOME:-/usr/share/modules}/init/bash" /etc/profile.d/{lmod,modules}.sh; do
        # shellcheck source=/dev/null
        if ! type module &>/dev/null && [[ -r $file ]]; then source "$file"; fi
    done
    type module &>/dev/null ||
        die "HVA_MODULES is set, but node ${nodes[0]} has no command 'module'" "Unset HVA_MODULES, or set MODULESHOME."
    for name in $HVA_MODULES; do
        # Environment Modules says on standard error alone that it failed.
        if ! { module load "$name" && module is-loaded "$name"; }; then
            die "module load $name failed" "Which names are there? See module avail, and edit HVA_MODULES."
        fi
    done
    set -u
}

# Sets rank_python, the words that start Python in a rank.
find_rank_python() {
    rank_python=()
    if [[ -n ${HVA_CONTAINER:-} ]]; then
        read -ra rank_python <<<"$HVA_CONTAINER"
        have "${rank_python[0]}" || die "HVA_CONTAINER starts with ${rank_python[0]}, which is not on ${nodes[0]}" \
            "Load its module (HVA_MODULES), or write its whole path."
        rank_python+=("${HVA_PYTHON:-python3}")
        return
    fi
    find_environment
    # The environment whose `hva slurm` wrote the scripts, unless another one was active at sbatch.
    if [[ -n ${written_by:-} && $env_dir == "$root/.venv" ]]; then
        python=$written_by
        env_dir=$(dirname "$(dirname "$python")")
    fi
    [[ -x $python ]] || die "no Python environment in $env_dir" \
        "Run launch/setup.sh once, on a machine that sees this folder, with the modules that this job loads;" \
        "or activate an environment that has torch and Horovod before sbatch."
    # horovodrun, and what the program itself starts.
    export PATH=$env_dir/bin:$PATH
    rank_python=("$python")
}

# Sets versions. Imports nothing: the ranks check that it works.
find_packages() {
    local code='import importlib.metadata as m, platform
found = {}
for name in ("torch", "horovod", "hvd_adaptive"):
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
assert "horovod" in found, "there is no Horovod"
print(platform.python_version() + ",", ", ".join(f"{name} {version}" for name, version in found.items()))'
    versions=$("${rank_python[@]}" -c "$code" 2>&1) || die "${rank_python[*]}: ${versions##*$'\n'}" \
        "Run launch/setup.sh, or hva install-horovod: they build Horovod with MPI, from whichever mpicc is on PATH." \
        "In a container image: HOROVOD_WITH_MPI=1 HOROVOD_WITH_PYTORCH=1, see launch/setup.sh."
}

set_environment() {
    local cores=${SLURM_CPUS_PER_TASK:-1}
    set_rank_defaults "$cores" "${#nodes[@]}"
    set_default PYTHONUNBUFFERED 1
    ((cores == 1)) || set_default HOROVOD_CYCLE_TIME 0.2
    if [[ -n ${HVA_INTERFACE:-} ]]; then
        set_default OMPI_MCA_btl_tcp_if_include "$HVA_INTERFACE"
        set_default OMPI_MCA_oob_tcp_if_include "$HVA_INTERFACE"
        set_default NCCL_SOCKET_IFNAME "$HVA_INTERFACE"
        set_default HOROVOD_GLOO_IFACE "$HVA_INTERFACE"
    fi
}

# ---------------------------------------------------------------- launcher

# Sets launcher, the words before a rank's command, and plugins, if it is srun.
set_launcher() {
    HVA_LAUNCHER=${HVA_LAUNCHER:-srun} plugins=
    local -a more
    read -ra more <<<"${HVA_LAUNCHER_OPTIONS:-}"
    case $HVA_LAUNCHER in
        srun) set_srun ;;
        mpirun) set_mpirun ;;
        horovodrun) set_horovodrun ;;
        *) die "HVA_LAUNCHER is '$HVA_LAUNCHER'" "Write srun, mpirun or horovodrun." ;;
    esac
    launcher+=(${more[@]+"${more[@]}"})
}

set_srun() {
    local plugin=${HVA_MPI:-pmix}
    plugins=$(srun --mpi=list 2>&1 | sed 's/.*: *//; /\.\.\./d' | xargs)
    [[ " $plugins " == *" $plugin "* ]] || die "srun has no MPI plugin '$plugin', only: $plugins" \
        "Name one that your MPI knows, such as HVA_MPI=pmix_v4 (pmi2 for Intel MPI and MPICH);" \
        "without any: HVA_LAUNCHER=mpirun. Open MPI needs pmix, which Slurm has if it was built with it."
    launcher=(srun "--mpi=$plugin" --kill-on-bad-exit=1)
    # Since 22.05 srun no longer takes it from the job.
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || launcher+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
}

require_mpirun() {
    have mpirun || die "no mpirun on ${nodes[0]}" "Load your MPI's module (HVA_MODULES), or write HVA_LAUNCHER=srun."
}

set_mpirun() {
    require_mpirun
    # It asks Slurm for the nodes. Bound to one core each, ranks of several threads would crawl.
    launcher=(mpirun -np "$ranks" --bind-to none)
}

set_horovodrun() {
    [[ -z ${HVA_CONTAINER:-} ]] || die "horovodrun cannot start ranks in a container" "Use srun or mpirun."
    require_mpirun
    have horovodrun || die "no horovodrun in $env_dir/bin nor on PATH" "Run launch/setup.sh, or hva install-horovod."
    require_ssh
    local i slots=
    for i in "${!nodes[@]}"; do slots+=,${nodes[i]}:${tasks[i]}; done
    launcher=(horovodrun -np "$ranks" -H "${slots#,}")
    [[ -z ${HVA_INTERFACE:-} ]] || launcher+=(--network-interfaces "$HVA_INTERFACE")
}

# horovodrun tries ssh to all other hosts, though its mpirun then starts the ranks by way of Slurm.
require_ssh() {
    local -a others
    ((${#nodes[@]} > 1)) || return 0
    mapfile -t others < <("${rank_python[@]}" -c 'import sys
from horovod.runner.util.network import filter_local_addresses
for host in filter_local_addresses(sys.argv[1:]): print(host)' "${nodes[@]}")
    local node
    for node in ${others[@]+"${others[@]}"}; do
        ssh -o BatchMode=yes -o ConnectTimeout=10 -o StrictHostKeyChecking=no "$node" true </dev/null ||
            die "no ssh from ${nodes[0]} to $node without a password, and horovodrun needs it" \
                "Use HVA_LAUNCHER=srun or mpirun, which do not; or put your own key into ~/.ssh/authorized_keys."
    done
}

# ---------------------------------------------------------------- folder

runs_folder() { say "${HVA_RUNS:-$SLURM_SUBMIT_DIR/runs/slurm}"; }

# make_folder PATH: sets folder, and what is in it. A job that is started again finds it as it left it.
make_folder() {
    { mkdir -p "$1/checkpoints" && : >"$1/.token"; } || die "cannot write to $1" \
        "Name a folder that all nodes share and you may write to: HVA_RUNS=/scratch/you."
    folder=$(cd "$1" && pwd)
    log=$folder/log
    rm -rf "$folder/ranks"
    mkdir "$folder/ranks"
}

# ---------------------------------------------------------------- what every node has

# Runs on each node, as a function handed to bash: this file may not be there. Prints "is: ..." and "lacks: ...".
probe_node() {
    local folder=$1 rank_script=$2 python=$3 interface=$4 gpus=$5 peer=$6 route interfaces
    interfaces=$(cd /sys/class/net && echo *)
    [[ $peer != "$SLURMD_NODENAME" ]] || peer=$7
    [[ -e $folder/.token ]] || echo "lacks: $folder, which is not shared with it"
    [[ -e $rank_script ]] || echo "lacks: $rank_script, so the folder of these scripts is not shared with it"
    command -v "$python" >/dev/null || echo "lacks: $python"
    if [[ -z $interface ]]; then
        route=$(ip -o route get "$(getent ahostsv4 "$peer" | awk '{ print $1; exit }')" 2>/dev/null)
        interface=$(sed -n 's/.* dev \([^ ]*\).*/\1/p' <<<"$route")
        [[ -n $interface ]] || interface="one of $interfaces"
    elif [[ ! -e /sys/class/net/$interface ]]; then
        echo "lacks: interface $interface; it has $interfaces"
    fi
    if [[ -n $gpus ]]; then
        local found
        found=$(nvidia-smi -L 2>/dev/null | wc -l)
        ((found > 0)) || echo "lacks: GPUs, or nvidia-smi to see them"
        gpus=", $found GPU(s)"
    fi
    echo "is: $(nproc) core(s)$gpus, network $interface"
}

# check_nodes: sets about_nodes; an error that names the nodes if something is missing on any.
check_nodes() {
    local found problems
    # shellcheck disable=SC2016
    local code='probe_node "$@" | sed "s/^/$SLURMD_NODENAME /"'
    found=$(srun --mpi=none --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 \
        bash -c "$(declare -f probe_node); $code" probe \
        "$folder" "$here/rank.sh" "${rank_python[0]}" "${HVA_INTERFACE:-}" "${HVA_GPUS:-}" \
        "${nodes[0]}" "${nodes[-1]}") || die "srun cannot run a command on each node" "$found"
    if problems=$(grep ' lacks: ' <<<"$found"); then
        die "not all nodes have what the job needs:"$'\n'"${problems// lacks: / lacks }" \
            "Put these scripts, environment and HVA_RUNS on a file system that all nodes mount; see ip link for" \
            "interfaces, and sinfo -o '%N %G' for nodes with GPUs."
    fi
    about_nodes=$(cut -d ' ' -f 3- <<<"$found" | sort | uniq -c |
        while read -r count each; do printf '; %s with %s' "$count" "$each"; done)
}

# ---------------------------------------------------------------- before the start

show() { printf '  %-10s %s\n' "$1" "$2"; }

describe() {
    local start=$((${SLURM_RESTART_COUNT:-0} + 1))
    say "--- $(date '+%F %T') job $job ($SLURM_JOB_NAME), start $start"
    show nodes "${#nodes[@]}: $SLURM_JOB_NODELIST$about_nodes"
    show ranks "$ranks; at most $SLURM_TASKS_PER_NODE a node, ${SLURM_CPUS_PER_TASK:-1} core(s) each"
    show launcher "$HVA_LAUNCHER${plugins:+; its MPI plugins: $plugins}"
    show MPI "$({ mpirun --version 2>/dev/null || say 'no mpirun on PATH'; } | head -n 1)"
    show python "${rank_python[*]}: $versions"
    show modules "${HVA_MODULES:-none}"
    show folder "$folder"
    show command "$(printf '%q ' "$@")"
}

# Do ranks reach each other? It costs one more start, and tells a wrong MPI from a wrong program.
check_ranks() {
    [[ ${HVA_CHECK:-yes} == yes ]] && ((ranks > 1)) || return 0
    local output status=0
    # horovodrun puts the rank before each line.
    output=$(timeout "${HVA_CHECK_SECONDS:-300}" "${launcher[@]}" "${rank_python[@]}" "$here/check.py" 2>&1 |
        sed 's/^\[[0-9,]*\]<std...>://') || status=$?
    say "$output"
    if ((status == 0)) && grep -q "ranks tried .* $ranks," <<<"$output"; then return; fi
    die "the $ranks ranks do not meet under $HVA_LAUNCHER (exit status $status, output above)" \
        "$(about_horovod)" \
        "One rank only, or two MPIs: Horovod and mpi4py must be built with the MPI of this job; run launch/setup.sh" \
        "or hva install-horovod with its modules loaded. Also try another HVA_LAUNCHER. HVA_CHECK=no skips this check."
}

about_horovod() {
    "${rank_python[@]}" -c 'import horovod.torch as hvd
if hvd.mpi_built(): print("Horovod has MPI.")
else: print("Horovod was built without MPI: load the module of an MPI, then run launch/setup.sh --force or hva install-horovod.")' 2>&1 |
        tail -n 1
}

# ---------------------------------------------------------------- signals

# tell_ranks SIGNAL: only srun's ranks are Slurm's; of the others, mpirun tells each one.
tell_ranks() {
    if [[ $HVA_LAUNCHER == srun ]]; then
        scancel --signal="$1" "$job" || true
        return 0 # in a trap, a bare "return" would give the status of what the signal interrupted
    fi
    local process
    for process in "$launched" $(descendants "$launched"); do
        [[ $(cat "/proc/$process/comm" 2>/dev/null) =~ ^(mpirun|orterun|prterun|mpiexec.*)$ ]] || continue
        if kill -s "$1" "$process"; then return 0; fi
    done
}

# stop_ranks SIGNAL: USR1, to continue later, or HUP, where the script was started by hand in a terminal now closed.
stop_ranks() {
    interrupted=yes
    # A second one would end the ranks before they have saved.
    [[ -z $told ]] || return 0
    told=$1
    # Perhaps to nobody.
    say "--- $(date '+%F %T') $1: the ranks are told to save and stop" || true
    if [[ -z $launched ]]; then
        too_early=yes
    elif [[ -z $(ls "$folder/ranks") ]]; then
        # No rank is there to hear it, and none may start any more. A gentle signal could take long.
        too_early=yes
        kill_tree "$launched"
    else
        tell_ranks "$1"
    fi
}

# ---------------------------------------------------------------- the run

# launch COMMAND...: sets status.
launch() {
    [[ -z $too_early ]] || return 0
    # The output's reader must outlive a signal to the whole job.
    "$@" > >(trap '' TERM USR1 HUP; exec tee -a "$log") 2>&1 &
    launched=$!
    # A signal ends the wait, not the launcher.
    interrupted=yes
    while [[ -n $interrupted ]]; do
        interrupted='' status=0
        wait "$launched" || status=$?
    done
}

# The status of the rank that failed first, if ranks have told theirs.
first_failure() { { cat "$folder"/ranks/* 2>/dev/null || true; } | awk '$2' | sort -n | awk 'NR == 1 { print $2 }'; }

# A launcher that could not start a single rank has been seen to end with 0.
prove_it_ran() {
    local -a started
    mapfile -t started < <(ls "$folder/ranks")
    ((${#started[@]} == ranks)) || die "$HVA_LAUNCHER ended with 0, but ${#started[@]} of $ranks ranks were started" \
        "Its output above may say why. Try another HVA_LAUNCHER."
    [[ -n $(ls "$folder/checkpoints") ]] || die "all ranks ended with 0, but none has saved anything" \
        "$script must save to its --checkpoint-dir."
}

# What the checkpoints are, so that one more can be told.
saved_so_far() { { stat -c '%n %Y %s' "$folder"/checkpoints/* 2>/dev/null || true; } | sha256sum | cut -c1-16; }

# Counts the runs in a row that saved nothing new.
most_restarts() {
    if [[ -n ${HVA_MAX_FRUITLESS:-} ]]; then
        say "HVA_MAX_FRUITLESS is an old name: write HVA_MAX_RESTARTS_WITHOUT_PROGRESS" >&2
    fi
    say "${HVA_MAX_RESTARTS_WITHOUT_PROGRESS:-${HVA_MAX_FRUITLESS:-3}}"
}

count_restarts_without_progress() {
    local before=none count=0 now
    now=$(saved_so_far)
    [[ ! -f $folder/requeues ]] || read -r before count <"$folder/requeues"
    count=$((count + 1))
    [[ $now == "$before" || $now == "$nothing_saved" ]] || count=0
    say "$now $count" >"$folder/requeues"
    ((count < $(most_restarts))) || die "$count runs in a row have saved nothing new: not requeued" \
        "Give a run more time (--time), save more often (--checkpoint-every), or start saving earlier (--signal)."
}
nothing_saved=$(sha256sum </dev/null | cut -c1-16)

requeue() {
    count_restarts_without_progress
    # Not by RequeueExit: a site may not have it.
    if ! scontrol requeue "$job"; then
        (die "Slurm did not requeue job $job" "To continue by hand, submit it again with HVA_FOLDER=$folder") || true
        exit "$try_later"
    fi
    say "--- $(date '+%F %T') requeued; it continues from $folder/checkpoints"
    requeued=yes
    exit "$try_later"
}

conclude() {
    local cause
    cause=$(first_failure)
    [[ -z $cause ]] || status=$cause
    if [[ $told == HUP ]]; then
        [[ -z $too_early ]] || status=129
    # USR1 ends a rank that is not yet listening.
    elif [[ -n $too_early ]] || ((status == try_later)) || { [[ -n $told ]] && ((status == 128 + 10)); }; then
        requeue
    fi
    ((status == 0)) || (die "the run failed with exit status $status" "Its output: $log") || exit "$status"
    prove_it_ran
    say "--- $(date '+%F %T') done; checkpoints in $folder/checkpoints"
}

# start FOLDER ARGUMENTS...
start() {
    told='' too_early='' launched='' status=0
    trap 'stop_ranks USR1' USR1
    trap 'stop_ranks HUP' HUP
    # Slurm tells all ranks itself; this script stays to see how they end.
    trap 'interrupted=yes' TERM
    script=${HVA_SCRIPT:-$root/launch/train.py}
    [[ -n ${HVA_SCRIPT:-} || -r $script ]] || die "there is no launch/train.py, so HVA_SCRIPT must name your script" \
        "HVA_SCRIPT=/path/to/train.py sbatch ..., or edit the line that sets it."
    [[ -r $script ]] || die "cannot read $script" "HVA_SCRIPT names the training script; the default is launch/train.py."
    local argument
    for argument in "${@:2}"; do
        case $argument in --checkpoint-dir* | --resume*) die "$argument is given by this script, for a job that continues" \
            "Leave it out. HVA_FOLDER=/path continues with another job's folder." ;; esac
    done
    load_modules
    find_rank_python
    find_packages
    make_folder "$1"
    set_environment
    set_launcher
    check_nodes
    local -a command=("${launcher[@]}" "$here/rank.sh" "$HVA_LAUNCHER" "$folder/ranks"
        "${rank_python[@]}" "$script" --checkpoint-dir "$folder/checkpoints" --resume auto "${@:2}")
    describe "${command[@]}"
    check_ranks
    launch "${command[@]}"
    conclude
}

# run_job ARGUMENTS...: the whole of a job that trains once.
run_job() {
    require_batch_job "$@"
    read_allocation
    start "${HVA_FOLDER:-$(runs_folder)/$SLURM_JOB_ID}" "$@"
}

# ---------------------------------------------------------------- sweeps

# run_sweep LIST ARGUMENTS...: this task's line of the list (a name of an array), after the arguments of all.
run_sweep() {
    local -n lines=$1
    shift
    require_batch_job "$@"
    read_allocation
    local count=${#lines[@]} index=${SLURM_ARRAY_TASK_ID:-none}
    [[ $index != none ]] || die "this job is no array" "Submit it with --array=0-$((count - 1))."
    ((index < count)) || die "the array has a task $index, but the list has $count lines" \
        "Submit it with --array=0-$((count - 1))."
    sweep=${HVA_FOLDER:-$(runs_folder)/$SLURM_ARRAY_JOB_ID}
    mkdir -p "$sweep/task-$index"
    # All tasks write the same; the last one wins.
    printf '%s\n' "${lines[@]}" >"$sweep/.list.$index"
    mv "$sweep/.list.$index" "$sweep/list"
    rm -f "$sweep/task-$index/status"
    trap 'end_task $?' EXIT
    local -a words
    # xargs knows quotes, and expands nothing.
    mapfile -t words <<<"$(xargs printf '%s\n' <<<"${lines[index]}")"
    start "$sweep/task-$index" "$@" "${words[@]}"
}

requeued=
end_task() {
    # It is not over.
    [[ -z $requeued ]] || return 0
    say "$1" >"$sweep/task-$SLURM_ARRAY_TASK_ID/status"
    [[ -x ${python:-} ]] || python=python3
    "$python" "$here/collect.py" "$sweep" --if-last "$SLURM_ARRAY_TASK_ID" || true
}
