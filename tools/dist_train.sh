#!/usr/bin/env bash
# Trains on several GPUs (without any: processes on the CPU): tools/dist_train.sh CONFIG GPUS [train.py options]
# On several machines, run it on each of them with
#   NNODES       number of machines                     (1)
#   NODE_RANK    0 on the first machine, then 1, 2, ... (0)
#   MASTER_ADDR  address of the first machine           (127.0.0.1)
#   PORT         a free port there                      (29500)
set -euo pipefail
if (($# < 2)); then
    echo "usage: $0 CONFIG GPUS [train.py options]" >&2
    exit 2
fi
torchrun=("${PYTHON:-python}" -m torch.distributed.run
    --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}"
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}"
    --nproc_per_node="$2")
exec "${torchrun[@]}" "$(dirname "$0")/train.py" "$1" --launcher pytorch "${@:3}"
