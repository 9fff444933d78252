#!/usr/bin/env bash
# Tests on several GPUs (without any: processes on the CPU):
#   tools/dist_test.sh CONFIG CHECKPOINT GPUS [test.py options]
# NNODES, NODE_RANK, MASTER_ADDR and PORT as in dist_train.sh.
set -euo pipefail
if (($# < 3)); then
    echo "usage: $0 CONFIG CHECKPOINT GPUS [test.py options]" >&2
    exit 2
fi
torchrun=("${PYTHON:-python}" -m torch.distributed.run
    --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}"
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}"
    --nproc_per_node="$3")
exec "${torchrun[@]}" "$(dirname "$0")/test.py" "$1" "$2" --launcher pytorch "${@:4}"
