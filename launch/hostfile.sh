#!/usr/bin/env bash
# Several machines over ssh, with DeepSpeed's launcher.
#
#   launch/hostfile.sh HOSTFILE +topology=8x2 engine=bf16
#
# HOSTFILE has one line a machine, in the order of their ranks:
#
#   node-a slots=8
#   node-b slots=8
#
# Every machine needs ssh without a password from this one, and the checkout and its environment under the same path.
# DeepSpeed passes NCCL_*, PYTHON* and the variables named in a .deepspeed_env file on to the other machines, nothing else.
# The sum of all slots must be a multiple of inter_sp x intra_sp.
set -euo pipefail
if [[ $# -lt 1 || ! -f "$1" ]]; then
    echo "usage: launch/hostfile.sh HOSTFILE [overrides of train.py]; no such hostfile: ${1:-none given}" >&2
    exit 2
fi
HOSTFILE=$(realpath "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec deepspeed --hostfile="$HOSTFILE" train.py "$@"
