#!/usr/bin/env bash
# Tests the CUDA kernels and measures the op and the backbones on one GPU, in at most 6 minutes. Writes gpu_check.json
# (what ran, on what, how it ended, every figure), op.csv and backbone.csv of each type, and the logs.
#
#   benchmarks/gpu_check.sh [--wheels DIR] [--out DIR] [--device cuda|cpu] [--quick]
#
#   --wheels DIR   Python packages to use without a network (benchmarks/wheels, if it is there)
#   --out DIR      folder for the results (work_dirs/gpu_check)
#   --device cpu   a rehearsal without a GPU: Triton interprets the kernels, and the steps take what time they need
#   --quick        a few small cases of everything
#   PYTHON         the interpreter (python3); it must have torch, triton, numpy, pytest, opencv, pillow, pyyaml, rich
#
# Everything else is pure Python and travels as wheels, 1.5 MB in all:
#   pip download --no-deps -d benchmarks/wheels mmengine==0.10.7 mmcv-lite==2.1.0 addict==2.4.0 termcolor==3.3.0 \
#       yapf==0.43.0 platformdirs==4.14.9
#
# Exit status: 0 if nothing failed, 1 if a step failed or ran out of time, 2 if the check cannot start.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
wheels=benchmarks/wheels
out=work_dirs/gpu_check
device=cuda
quick=
fail() { printf '%s\n' "$*" >&2; exit 2; }
while (($#)); do
    case $1 in
        --wheels | --out | --device)
            (($# > 1)) || fail "$1 needs a value"
            declare "${1#--}=$2"
            shift ;;
        --quick) quick=yes ;;
        -h | --help) sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
        *) fail "unknown option $1; see $0 --help" ;;
    esac
    shift
done
[[ $device == cuda || $device == cpu ]] || fail "--device must be cuda or cpu, got $device"

# ---- packages -----------------------------------------------------------------------------------
mkdir -p "$out" || exit 2
out=$(realpath "$out")
site=$(mktemp -d) || exit 2
trap 'rm -rf "$site"' EXIT
if compgen -G "$wheels/*.whl" >/dev/null; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$site" "$wheels"/*.whl \
        || fail "the wheels in $wheels cannot be installed"
fi
export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
"$python" -c 'import pytest, rich, triton, mminline.models' \
    || fail "a package is missing: see $0 --help for what goes where"
"$python" -c "import sys, torch; sys.exit('$device' == 'cuda' and not torch.cuda.is_available())" \
    || fail 'PyTorch finds no GPU here (--device cpu rehearses without one)'

# ---- steps --------------------------------------------------------------------------------------
steps=$out/steps.tsv
: >"$steps"
failed=0

# step NAME SECONDS COMMAND...: runs a command, on a GPU at most so long, and notes how it ended.
step() {
    local name=$1 limit=$2 start=$SECONDS status state
    shift 2
    [[ $device == cuda ]] || limit=0  # none
    printf '\n== %s\n' "$name"
    timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$out/$name.log"
    status=${PIPESTATUS[0]}
    case $status in
        0) state=passed ;;
        124 | 137) state='out of time'; failed=1 ;;
        *) state=failed; failed=1 ;;
    esac
    printf '%s\t%s\t%s\t%s\n' "$name" "$state" $((SECONDS - start)) "$*" >>"$steps"
}

tests=(-q -p no:cacheprovider -m 'not slow' tests/test_triton.py tests/test_precision.py)
op=(--device "$device" --seconds 0.6 --max-call-seconds 0.2)
backbone=(--device "$device" --methods formula softmax --dtypes float32 bfloat16 --seconds 6
    --max-call-seconds 2)
if [[ $quick ]]; then
    tests+=(-k 'test_many_splits or test_float64')
    op+=(--sizes 7 --channels 64 --seconds 0.1)
    backbone+=(--sizes 64 --seconds 0.1)
else
    backbone+=(--sizes 512 1024 2048)
fi
step kernel_tests 150 "$python" -m pytest "${tests[@]}"
for dtype in float32 bfloat16; do
    step "op_$dtype" 40 "$python" tools/analysis/benchmark_op.py "${op[@]}" --dtype $dtype --out "$out/$dtype"
done
step backbone 60 "$python" tools/analysis/benchmark_backbone.py "${backbone[@]}" --out "$out"
if [[ $device == cpu ]]; then
    printf 'memory_check\tskipped\t0\tcompute-sanitizer needs a GPU\n' >>"$steps"
elif ! command -v compute-sanitizer >/dev/null; then
    printf 'memory_check\tskipped\t0\tcompute-sanitizer is not installed\n' >>"$steps"
else
    step memory_check 45 compute-sanitizer --tool memcheck --error-exitcode 1 \
        "$python" -m pytest -q -p no:cacheprovider tests/test_triton.py -k 'test_sizes and 777 and float32'
fi

# ---- one file -----------------------------------------------------------------------------------
"$python" - "$out" "$device" "$quick" <<'EOF' || exit 1
import csv
import json
import platform
import sys
from pathlib import Path

import torch
import triton

import mminline
from mminline.analysis.measure import device_name


def rows_of(path):
    """Read a CSV, numbers as numbers; no rows if the step did not get that far."""
    def value(text):
        try:
            return json.loads(text.replace('nan', 'null'))
        except ValueError:
            return text
    if not path.exists():
        return []
    with path.open(newline='') as file:
        return [{name: value(text) for name, text in row.items()} for row in csv.DictReader(file)]


out, device, quick = Path(sys.argv[1]), torch.device(sys.argv[2]), bool(sys.argv[3])
steps = [dict(zip(('name', 'state', 'seconds', 'command'), line.split('\t')))
         for line in (out / 'steps.tsv').read_text().splitlines()]
for step in steps:
    step['seconds'] = int(step['seconds'])
result = dict(
    device=device_name(device), quick=quick, mminline=mminline.__version__, torch=torch.__version__,
    cuda=torch.version.cuda, triton=triton.__version__, python=platform.python_version(), steps=steps,
    op=rows_of(out / 'float32/op.csv') + rows_of(out / 'bfloat16/op.csv'), backbone=rows_of(out / 'backbone.csv'))
(out / 'gpu_check.json').write_text(json.dumps(result, indent=1) + '\n')
for step in steps:
    print(f"{step['name']:14} {step['state']:12} {step['seconds']:4} s")
print(f"Written to {out / 'gpu_check.json'}")
EOF
exit $failed
