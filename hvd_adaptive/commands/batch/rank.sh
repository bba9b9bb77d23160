#!/usr/bin/env bash
# One rank of a batch job: what the launcher starts on each node in place of the program.
#
#     launch/slurm/rank.sh LAUNCHER FOLDER PROGRAM [ARGUMENTS...]
#
# Leaves a file in FOLDER, so that the batch script can tell that the rank was started at all, and, under srun,
# how it ended. srun itself cannot say: --kill-on-bad-exit=1 ends the other ranks by a signal, and of all exit
# statuses srun returns the largest, which is that of its victims.
set -euo pipefail

case ${1-} in -h | --help | '') sed -n '2,/^[^#]/{/^#/!q; s/^# \{0,1\}//; p}' "$0"; exit ;; esac
launcher=$1 folder=$2
shift 2
# Under mpirun the SLURM_* variables are those of the batch script.
rank=${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${PMI_RANK:-${SLURM_PROCID:-$$}}}}
file=$folder/${SLURMD_NODENAME:-$(hostname)}.$rank
: >"$file"

# mpirun and horovodrun return what the first rank that failed has returned.
[[ $launcher == srun ]] || exec "$@"

# Slurm sends a signal to all processes of a rank. Only the program acts on it; here it ends a wait, no more.
interrupted=yes ended=
trap 'interrupted=yes' USR1 HUP
trap 'interrupted=yes ended=yes' TERM
"$@" <&0 &
while [[ -n $interrupted ]]; do
    interrupted='' status=0
    wait $! || status=$?
done

# A rank that Slurm has ended is no cause.
[[ -n $ended ]] || printf '%s %s\n' "$(date +%s.%N)" "$status" >"$file"
# Stopped, to continue later: no reason to kill the other ranks, which are about to end likewise.
((status != 75)) || exit 0
exit "$status"
