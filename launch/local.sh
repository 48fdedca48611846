#!/usr/bin/env bash
# One machine: train on the accelerators of this node, or on CPU ranks where there are none.
#
#   launch/local.sh +topology=4x2 planner=sap train.steps=200
#
# The number of ranks follows from the topology, inter_sp x intra_sp. For data parallelism on top, start a multiple of it:
#
#   RANKS=8 launch/local.sh +topology=2x2        # two SP groups of four ranks, dp=2
# After a failure the run goes on from its newest good checkpoint, so many times:
#
#   launch/local.sh +topology=4x2 train.save_every=50 guard.restarts=3
#   RANKS=8 RESTARTS=3 launch/local.sh +topology=2x2 train.save_every=50
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${RANKS:-}" ]]; then
    # train.py starts its ranks itself.
    exec python train.py "$@"
fi
# --standalone: a rendezvous of this machine alone, on a free port, so that several runs can live side by side.
exec python -m torch.distributed.run --standalone --nproc-per-node="$RANKS" --max-restarts="${RESTARTS:-0}" train.py "$@"
