#!/usr/bin/env bash
# Runs all benchmarks, one after the other: hours, of which training.py takes most.
#
#     sudo -E benchmarks/run_all.sh [--quick] [--fresh] [--list] [NAME...]
#
#     NAME...    these only, such as kernels or training
#     --quick    small and few: minutes; no figures are written
#     --fresh    also what an earlier call has finished
#     --list     what there is and which of it is finished; nothing runs
#
# Resumable: what is finished is left out the next time, and scripts that take long continue where they were.
# Ctrl-C ends the running script, which keeps what it has, and shows what is done and what is left.
# Each script's output is also in runs/benchmarks/NAME.log. Slow networks need root (launch/netlab.sh); without
# it, what needs them is skipped. Afterwards, benchmarks/report/results_page.py puts the figures into RESULTS.md, README.md and
# docs/.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../launch/lib/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch/lib/common.sh"

names=(kernels wire overhead priority schemes automatic planner planning_cost accuracy allocation sensitivity aggregate_error many_ranks calibration long_runs three_bits
    static_factors kimad_tables multi_level gravac_search auto_grid prediction bucket_costs bucket_times training whole_runs bandwidth_trace adaptive scaling soak)
needs_netlab=" priority schemes automatic prediction bucket_costs bucket_times training whole_runs bandwidth_trace adaptive scaling soak "

benchmarks=$root/benchmarks
logs=$root/runs/benchmarks

# The arguments of one script; accuracy.py has no --quick of its own.
arguments_of() {
    [[ -n $quick ]] || return 0
    case $1 in
        accuracy) say --only none --seeds 1 --epochs 0.02 --out "$logs/accuracy.json" ;;
        *) say --quick ;;
    esac
}

# Why a script cannot run here, or nothing.
why_not() {
    [[ $needs_netlab != *" $1 "* ]] || (cd "$root" && "$python" -c 'from benchmarks.harness import lab; print(lab.why_not())')
}

# The package that a benchmark is in.
room_of() {
    local file
    for file in "$benchmarks"/*/"$1.py"; do
        [[ ! -e $file ]] || basename "$(dirname "$file")"
    done
}

is_finished() { [[ -z $quick && -z $fresh && -e $logs/$1.done ]]; }

parse_arguments() {
    quick='' fresh='' list='' chosen=()
    while (($#)); do
        case $1 in
            --quick) quick=yes ;;
            --fresh) fresh=yes ;;
            --list) list=yes ;;
            -h | --help) usage; exit ;;
            -*) die "unknown option '$1'" "$program --help lists them" ;;
            *) chosen+=("$1") ;;
        esac
        shift
    done
    local name
    for name in ${chosen[@]+"${chosen[@]}"}; do
        [[ " ${names[*]} " == *" $name "* && -n $(room_of "$name") ]] || die "there is no benchmark '$name'"
    done
    ((${#chosen[@]})) || for name in "${names[@]}"; do
        [[ -z $(room_of "$name") ]] || chosen+=("$name")
    done
}

# run NAME: its exit status.
run() {
    local status=0
    local -a words
    read -ra words <<<"$(arguments_of "$1")"
    # tee outlives Ctrl-C, so that the script's last words are seen.
    (cd "$root" && exec "$python" -u -m "benchmarks.$(room_of "$1").$1" ${words[@]+"${words[@]}"}) 2>&1 | tee -i "$logs/$1.log" || status=${PIPESTATUS[0]}
    return "$status"
}

main() {
    parse_arguments "$@"
    find_environment
    [[ -x $python ]] || die "there is no Python environment yet" "launch/setup.sh makes it"
    mkdir -p "$logs"
    # Only the script ends at once; this one tells what is done.
    local interrupted='' failed='' name reason number=0 status
    trap 'interrupted=yes' INT TERM
    local -a summary=()
    for name in "${chosen[@]}"; do
        number=$((number + 1))
        reason=$(why_not "$name")
        if is_finished "$name"; then
            summary+=("$name: finished before")
        elif [[ -n $interrupted || -n $list ]]; then
            summary+=("$name: left${reason:+ ($reason)}")
        elif [[ -n $reason ]]; then
            summary+=("$name: skipped, $reason")
        else
            say "=== [$number/${#chosen[@]}] $name ($(date +%H:%M)) ==="
            status=0
            run "$name" || status=$?
            if ((status == 0)); then
                [[ -n $quick ]] || date >"$logs/$name.done"
                summary+=("$name: finished")
            elif [[ -n $interrupted ]]; then
                summary+=("$name: interrupted")
            else
                failed=yes
                summary+=("$name: failed with status $status, see ${logs#"$PWD/"}/$name.log")
            fi
        fi
    done
    say
    printf '%s\n' "${summary[@]}"
    [[ -z $interrupted ]] || exit 130
    [[ -z $failed ]] || exit 1
}

main "$@"
