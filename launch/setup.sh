#!/usr/bin/env bash
# Sets up everything that training and testing need; does nothing, quickly, when it is all there.
#
#     launch/setup.sh [--quiet | --check | --force]
#
#     --quiet   say nothing when nothing is to do
#     --check   only say whether anything is to do (exit status 1 if so)
#     --force   do every step again; a cached Horovod wheel is still used. The active environment is made this
#               folder's, also if its hvd_adaptive is installed from another clone
#
# Uses the MPI and the compiler on PATH (on a cluster: load their modules first). Where they are missing it
# installs Debian's if it may, and otherwise says what is missing. Python packages go into the active
# environment if that has torch, otherwise into .venv in this repository.
#
# Environment:
#     PYTHON       the interpreter that .venv is made with (default: python3)
#     HVA_TORCH    what pip installs as torch into .venv, options included (default: torch==2.13.0)
#     HVA_EXTRAS   further extras of setup.cfg, with commas: gpu brings Triton, whose kernels the tests interpret
#                  (300 MB), trainers Lightning, Accelerate and Transformers (220 MB), trackers W&B and MLflow (170 MB)
#     HVA_CACHE    where the built Horovod wheels are kept (default: ~/.cache/hvd_adaptive/wheels; without HOME:
#                  build/wheels in this repository)
#     HVA_DATA     the folder for the data sets (default: data/ in this repository)
#     HOROVOD_*    passed to Horovod's build, e.g. HOROVOD_GPU_OPERATIONS=NCCL
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

# The one place where torch's version is pinned; Horovod's is in what builds it.
torch_requirement=${HVA_TORCH:-torch==2.13.0}
horovod_builder=$root/hvd_adaptive/commands/install_horovod.py
horovod_version=$(sed -n 's/^VERSION: Final = "\(.*\)"$/\1/p' "$horovod_builder")

cache=${HVA_CACHE:-}
if [[ -z $cache && -n ${XDG_CACHE_HOME:-${HOME:-}} ]]; then
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/hvd_adaptive/wheels
fi
data_dir=${HVA_DATA:-$root/data}
log=$root/build/setup.log

# ---------------------------------------------------------------- what is there, and is it up to date?

digest() { sha256sum | cut -c1-16; }

# The variables that decide what a build of Horovod contains (others, such as HOROVOD_CYCLE_TIME, do not).
horovod_build_variables() {
    env | grep -E '^HOROVOD_(WITH|GPU_|CPU_OPERATIONS|CUDA_|NCCL_|ROCM_|BUILD_|DEBUG|CMAKE)' | sort || true
}

mpi_identity() { { mpirun --version | head -n 1; mpicc -show || mpicc --version | head -n 1; } 2>&1 || true; }

python_versions() {
    "$python" - <<'PYTHON' 2>/dev/null || echo none
import importlib.metadata as m, sys

def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return "none"

print(sys.implementation.cache_tag, *(f"{n}-{version(n)}" for n in ("torch", "horovod", "hvd_adaptive", "mpi4py")))
PYTHON
}

# Where the environment's hvd_adaptive is, if it is an editable install of another folder that has one.
other_clone() {
    local folder
    folder=$("$python" - <<'PYTHON' 2>/dev/null
import importlib.metadata, json, urllib.parse, urllib.request

text = importlib.metadata.distribution("hvd_adaptive").read_text("direct_url.json")
found = json.loads(text or "{}")
if found.get("dir_info", {}).get("editable"):
    print(urllib.request.url2pathname(urllib.parse.urlparse(found["url"]).path))
PYTHON
    ) || return 0
    if [[ -n $folder && -d $folder/hvd_adaptive && ! $folder -ef $root ]]; then say "$folder"; fi
}

# What is active belongs to the clone that it was set up from: to point it here would change what is trained there.
require_own_environment() {
    local other
    [[ $env_dir != "$root/.venv" ]] || return 0
    other=$(other_clone)
    [[ -z $other ]] || die "the active environment $env_dir is set up for another clone: its hvd_adaptive is $other" \
        "For an environment of this clone's own, deactivate that one: env -u VIRTUAL_ENV -u CONDA_PREFIX $0" \
        "To use that environment for this clone from now on, and no longer for the other: launch/setup.sh --force"
}

# Changes whenever the environment has to be looked at again.
environment_key() {
    {
        cat "$root"/launch/{setup.sh,lib/common.sh,slurm/check.py} "$root"/{setup.cfg,pyproject.toml} "$horovod_builder"
        say "$root" "$torch_requirement"
        python_versions
        other_clone
        mpi_identity
        horovod_build_variables
    } | digest
}

# By time and size, not by content: so does Numba decide whether its cache still holds.
kernels_key() { { find "$root"/hvd_adaptive/{kernels,wire} -name "*.py" -exec stat -c "%n %Y %s" {} + 2>/dev/null | sort || true; } | digest; }

stamped() { [[ -f $state/$1 && $(<"$state/$1") == "$2" ]]; }
stamp() { mkdir -p "$state" && say "$2" >"$state/$1"; }

# Extras that are there already do no harm to who asks for none.
environment_done() {
    stamped environment "$(environment_key)" || return 1
    [[ -z ${HVA_EXTRAS:-} ]] || stamped extras "$HVA_EXTRAS"
}
kernels_done() { stamped kernels "$(kernels_key)"; }
# Tried is done: without a network, every start would wait for it again.
data_done() { [[ -e $data_dir/.tried ]]; }
all_done() { environment_done && kernels_done && data_done; }

# ---------------------------------------------------------------- steps

# attempt TITLE REMEDY COMMAND...: one line with the time it took, and where it failed what to do about it. The
# command's output goes to the log. The outcome is in status: as a condition, "attempt" would run without set -e.
attempt() {
    local title=$1 remedy=$2 started=$SECONDS
    shift 2
    printf '  %-58s' "$title"
    say "=== $title" >>"$log"
    show_patience &
    ticker=$!
    set +e
    (set -e; "$@") >>"$log" 2>&1
    status=$?
    set -e
    stop_ticker
    if ((status != 0)); then
        printf ' failed\n'
        {
            say "--- the end of $log:"
            tail -n 20 "$log" | sed 's/^/    /'
            say "$program: the step \"$title\" failed (exit status $status; everything it printed is in $log)."
            say "    $remedy"
        } >&2
        return
    fi
    printf ' %4d s\n' $((SECONDS - started))
}

step() {
    attempt "$@"
    ((status == 0)) || exit 1
}

# A dot every ten seconds, so that a long step is seen to live.
show_patience() {
    # The lock belongs to the script, not to its helpers.
    exec 9>&-
    # A pipe that nobody writes to: "sleep" would outlive a killed helper and hold the output open.
    local never
    exec {never}<> <(:)
    while kill -0 $$ 2>/dev/null && ! read -rt 10 -u "$never"; do printf '.'; done
}

ticker=
stop_ticker() {
    [[ -n $ticker ]] || return 0
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    ticker=
}

# ---------------------------------------------------------------- system tools

# Each line: a shell condition, what it stands for, Debian's package.
missing_tools() {
    local base_python=${PYTHON:-python3}
    [[ -x $python ]] && base_python=$python
    have mpicc || say "mpicc|libopenmpi-dev"
    have mpirun || say "mpirun|openmpi-bin"
    have g++ || say "g++|g++"
    have make || say "make|make"
    have cmake || say "cmake|cmake"
    if ! have "$base_python"; then
        say "$base_python|python3"
        say "Python's headers|python3-dev"
        say "Python's venv|python3-venv"
        return
    fi
    "$base_python" -c 'import os, sysconfig as s; assert os.path.exists(s.get_path("include") + "/Python.h")' \
        2>/dev/null || say "Python's headers|python3-dev"
    "$base_python" -c 'import ensurepip, venv' 2>/dev/null || say "Python's venv|python3-venv"
}

may_install() { ((EUID == 0)) && have apt-get; }

install_packages() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update
    apt-get install -y --no-install-recommends "$@"
}

ensure_tools() {
    local -a tools packages
    mapfile -t tools < <(missing_tools)
    ((${#tools[@]})) || return 0
    packages=("${tools[@]#*|}")
    local names
    names=$(printf '%s, ' "${tools[@]%|*}")
    names=${names%, }
    if ! may_install; then
        die "missing: $names." \
            "On a cluster: load the modules of an MPI, a C++ compiler, CMake and Python, and run this again." \
            "On Debian or Ubuntu: sudo apt-get install ${packages[*]}" \
            "Or with conda: conda install -c conda-forge openmpi cxx-compiler cmake make python"
    fi
    step "Install ${packages[*]}" \
        "Install them by hand (apt-get install ${packages[*]}), then run this again." \
        install_packages "${packages[@]}"
    mapfile -t tools < <(missing_tools)
    ((${#tools[@]} == 0)) || die "still missing after the installation: ${tools[*]%|*}." \
        "If Python is not Debian's own, its headers and venv module have to come from where it came from."
}

check_python() {
    local base_python=${PYTHON:-python3}
    [[ -x $python ]] && base_python=$python
    "$base_python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$base_python is $("$base_python" --version), and this needs Python 3.10 or newer." \
            "Name another with PYTHON=/path/to/python3.12 $program, or load a newer Python's module."
}

# ---------------------------------------------------------------- Python environment

make_environment() {
    # --clear: what stands there has no working interpreter.
    "$python" -c '' || "${PYTHON:-python3}" -m venv --clear "$env_dir"
    "$python" -m pip --version || "$python" -m ensurepip
    "$python" -m pip install 'setuptools>=64' wheel
}

install_torch() {
    local -a words
    read -ra words <<<"$torch_requirement"
    "$python" -m pip install "${words[@]}"
}

wheel_folder() {
    local versions build
    versions=$("$python" -c 'import sys, platform, importlib.metadata as m
print("torch-" + m.version("torch"), sys.implementation.cache_tag, platform.machine(), sep="_")')
    build=$({ mpi_identity; horovod_build_variables; } | digest)
    say "$cache/horovod-${horovod_version}_${versions}_$build"
}

horovod_there() { stamped horovod "$1" && "$python" -c 'import horovod.torch'; }

# Also "hva install-horovod"; here the wheel is kept, for other environments with the same torch and MPI.
build_horovod() { "$python" "$horovod_builder" --wheel-into "$1"; }

install_horovod() {
    local wheel=$1
    "$python" -m pip install "$wheel"
    # Same version, other build: pip alone would leave the old one.
    "$python" -m pip install --force-reinstall --no-deps "$wheel"
    (cd / && "$python" -c 'import horovod.torch')
}

ensure_horovod() {
    local folder
    folder=$(wheel_folder)
    if horovod_there "$folder" >>"$log" 2>&1; then return; fi
    if ! compgen -G "$folder/*.whl" >/dev/null; then
        step "Build Horovod $horovod_version (minutes; kept for next time)" \
            "Usual causes: a compiler without C++17 (C++20 from torch 2.14 on), too little memory (try MAKEFLAGS=-j1), an mpicc of another MPI." \
            build_horovod "$folder"
    fi
    local -a wheels=("$folder"/*.whl)
    step "Install Horovod $horovod_version" \
        "Remove the wheel and run this again, to build it again: rm -r $folder" \
        install_horovod "${wheels[0]}"
    stamp horovod "$folder"
}

install_package() { "$python" -m pip install --no-build-isolation -e "${root}[dev,train${HVA_EXTRAS:+,$HVA_EXTRAS}]"; }

# PyPI's mpi4py finds the MPI at run time, and on some clusters the wrong one or none.
match_mpi4py() {
    local wanted found
    wanted=$(mpirun --version | grep -oE '[0-9]+(\.[0-9]+)+' | head -n 1)
    found=$("$python" -c 'from mpi4py import MPI; print(MPI.Get_library_version().rstrip("\0"))') || found=none
    say "mpirun is of $wanted, mpi4py's library: $found"
    [[ $found == *"$wanted"* ]] || "$python" -m pip install --force-reinstall --no-deps --no-binary mpi4py mpi4py
}

set_up_environment() {
    ensure_tools
    check_python
    step "Python environment $env_dir" "Remove $env_dir and run this again." make_environment
    if [[ $env_dir == "$root/.venv" ]]; then
        step "Install $torch_requirement" \
            "Is the package index reachable? For another build of torch set HVA_TORCH (see $program --help)." install_torch
    fi
    ensure_horovod
    step "Install hvd_adaptive and its tools" "Is the package index reachable? See the log." install_package
    step "Match mpi4py to the MPI" "mpi4py has to be built with this mpicc: see the log." match_mpi4py
}

# ---------------------------------------------------------------- the rest

# Once and here, because otherwise each of 16 ranks would compile them at its first step.
warm_kernels() {
    if [[ -f $root/hvd_adaptive/commands/precompile.py ]]; then "$python" -m hvd_adaptive.commands.precompile; fi
}

# A kernel that does not compile is for the tests to explain: the environment is no worse for it.
ensure_kernels() {
    attempt "Compile the kernels" "The kernels are at fault, not the environment: see launch/test.sh." warm_kernels
    if ((status == 0)); then stamp kernels "$(kernels_key)"; fi
}

fetch_data() {
    # A data set that cannot be had is no reason to stop: train.py has another.
    "$root/launch/fetch_data.sh" 9>&- 2>&1 | tee -a "$log" | sed -u 's/^/  /' || true
    mkdir -p "$data_dir"
    touch "$data_dir/.tried"
}

check_ranks() {
    cd /
    # The two may have to share one core.
    OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1 PATH=$env_dir/bin:$PATH \
        timeout 120 "$env_dir/bin/horovodrun" -np 2 "$python" "$root/launch/slurm/check.py" 9>&- | tee "$1"
}

show_result() {
    say
    # The launcher puts the rank before each line.
    sed -n 's/^\[[0-9,]*\]<stdout>:  /  /; s/\[[0-9,]*\]<stdout>://g; /^  /p' "$table"
    printf '  %-12s %s\n' compiler "$(g++ --version | head -n 1)" \
        environment "$env_dir" data "$data_dir" wheels "$cache"
    say_next
}

say_next() {
    local as_root=
    ((EUID != 0)) || as_root=' --allow-run-as-root'
    say
    say "  Train:   launch/run.sh            Test: launch/test.sh"
    if [[ $env_dir == "$root/.venv" ]]; then
        say "  By hand: source .venv/bin/activate, then one of"
    else
        say "  By hand, one of"
    fi
    say "               horovodrun -np 4 python launch/train.py"
    say "               mpirun$as_root --oversubscribe -bind-to none -np 4 python launch/train.py"
}

set_up() {
    mkdir -p "$(dirname "$log")"
    say "=== $(date '+%F %T') $program" >"$log"
    say "Setting up in $env_dir (log: $log)"
    if [[ -z $cache ]]; then
        cache=$root/build/wheels
        say "  HOME is not set, so Horovod's wheel is kept in $cache (HVA_CACHE=/path names another folder)."
    fi
    if ! environment_done; then
        set_up_environment
        table=$(mktemp)
        step "Two ranks reduce together" \
            "Does mpirun itself work here? Try: mpirun -np 2 hostname (in a container as root with --allow-run-as-root)." \
            check_ranks "$table"
        # Only now: what was not seen to work does not count as done.
        stamp environment "$(environment_key)"
        [[ -z ${HVA_EXTRAS:-} ]] || stamp extras "$HVA_EXTRAS"
    fi
    kernels_done || ensure_kernels
    data_done || fetch_data
    [[ ! -v table ]] || show_result
}

main() {
    local mode=${1-}
    case $mode in
        '' | --quiet | --check | --force) ;;
        -h | --help) usage; exit ;;
        *) die "unknown option '$mode'" "Known are --quiet, --check, --force and --help." ;;
    esac
    (($# <= 1)) || die "one option at a time, not '$*'"
    find_environment
    state=$env_dir/.hvd_adaptive
    if [[ $mode != --force ]] && all_done; then
        [[ $mode == --quiet ]] || say "Nothing to do: $env_dir is up to date."
        return
    fi
    [[ $mode == --force ]] || require_own_environment
    if [[ $mode == --check ]]; then
        say "$env_dir is not up to date: run launch/setup.sh."
        exit 1
    fi
    exec 9>"$root/.setup.lock"
    if ! flock -n 9; then
        say "Another setup.sh is at work in $root; waiting for it."
        flock 9
        # It may have made .venv, or finished the whole job.
        find_environment
        state=$env_dir/.hvd_adaptive
    fi
    trap 'stop_ticker; [[ ! -v table ]] || rm -f "$table"' EXIT
    [[ $mode != --force ]] || rm -rf "$state" "$data_dir/.tried"
    if all_done; then
        say "It left nothing to do."
    else
        set_up
    fi
}

main "$@"
