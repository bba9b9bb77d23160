#!/usr/bin/env bash
# Checks everything: style (ruff), types (mypy), tests (pytest). Sets up what is missing first.
#
#     launch/test.sh [pytest's options and files]
#
# With -n 2 --dist loadfile, two files at a time: many tests wait for other programs.
# The exit status is 0 only if all three pass. pytest runs whatever the other two found, and comes last.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

failed=()
# check NAME COMMAND...
check() {
    local name=$1
    shift
    say "--- $name"
    if ! "$@"; then failed+=("$name"); fi
}

main() {
    if [[ ${1-} == --help || ${1-} == -h ]]; then
        usage
        exit
    fi
    "$root/launch/setup.sh" --quiet
    find_environment
    # Tests start mpirun and horovodrun by name.
    export PATH=$env_dir/bin:$PATH
    # Their tensors are small: threads would mostly wait for each other, and spin while they do.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    cd "$root"

    check ruff "$python" -m ruff check .
    check mypy "$python" -m mypy
    if ((${#failed[@]})); then
        say "--- before the tests: ${failed[*]} FAILED, so this run fails whatever the tests say"
    else
        say "--- before the tests: ruff and mypy passed"
    fi

    # Its closing line is the last of the output, for people and machines that look there.
    local status=0
    "$python" -m pytest "$@" || status=$?
    ((${#failed[@]} == 0)) || exit 1
    exit "$status"
}

main "$@"
