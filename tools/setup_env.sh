#!/usr/bin/env bash
# Makes .venv: torch, the pinned requirements, mmcv with its compiled ops, this project (editable).
# Run through make. Safe to run again at any time: what is done is not done twice.
#   TORCH   what to hand to pip for torch (default torch==2.13.0)
#   PYTHON  the interpreter to make .venv of (default python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH=${TORCH:-torch==2.13.0}
PYTHON=${PYTHON:-python3}
MMCV=2.1.0
venv=$PWD/.venv
python=$venv/bin/python
say() { printf '[set-up] %s\n' "$*"; }
fail() { printf '[set-up] %s\n' "$*" >&2; exit 1; }
pip() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }

# ---- nothing to do? ---------------------------------------------------------------------------
wanted=$({ echo "$TORCH $PYTHON"; cat requirements/*.txt setup.py tools/setup_env.sh; } | cksum)
[[ -f $venv/complete && $(<"$venv/complete") == "$wanted" ]] && exit 0

# ---- the virtual environment and torch --------------------------------------------------------
command -v "$PYTHON" >/dev/null || fail "no $PYTHON (another interpreter: make PYTHON=...)"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 9))' \
    || fail "$("$PYTHON" -V) is too old: 3.9 or newer is needed (another interpreter: make PYTHON=...)"
"$PYTHON" -c 'import ensurepip' 2>/dev/null || fail "$PYTHON has no venv (Debian: apt-get install python3-venv)"
command -v g++ >/dev/null || fail "no g++, which mmcv is compiled with (Debian: apt-get install g++)"
rm -f "$venv/complete"
"$python" -m pip --version >/dev/null 2>&1 || { say "creating .venv"; "$PYTHON" -m venv --clear "$venv"; }
say "installing $TORCH"
# shellcheck disable=SC2086  # TORCH may hold several words
pip install $TORCH
torch_version=$("$python" -c 'import torch; print(torch.__version__)')

# From here on nothing may replace the chosen torch, not even as somebody's dependency.
export PIP_CONSTRAINT=$venv/torch-constraint.txt
echo "torch==$torch_version" > "$PIP_CONSTRAINT"
say "installing the pinned requirements"
pip install -r requirements/build.txt -r requirements/pinned.txt

# ---- mmcv with its compiled ops ---------------------------------------------------------------
# A wheel fits one Python and one torch only, so these name the folder it is kept in.
key=$("$python" -c 'import platform, sys, torch
print(f"cp{sys.version_info.major}{sys.version_info.minor}-torch{torch.__version__}-{platform.machine()}")')
wheels=${XDG_CACHE_HOME:-$HOME/.cache}/mminline/wheels/$key
mkdir -p "$wheels"
wheel() { find "$wheels" -maxdepth 1 -name "mmcv-$MMCV-*.whl" -print -quit; }
build_mmcv() {
    local build=$wheels/build
    if [[ ! -f $build/unpacked ]]; then
        rm -rf "$build" && mkdir -p "$build"
        pip download --no-deps --no-binary mmcv --no-build-isolation -d "$build" "mmcv==$MMCV"
        tar -xzf "$build/mmcv-$MMCV.tar.gz" -C "$build" --strip-components 1
        # The headers of torch 2.14 and newer need C++20; mmcv 2.1.0 asks for C++17.
        if "$python" -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14))'
        then sed -i 's/-std=c++17/-std=c++20/g' "$build/setup.py"; fi
        touch "$build/unpacked"
    fi
    # The objects stay in $build: an interrupted build goes on where it stopped.
    (cd "$build" && PATH=$venv/bin:$PATH MMCV_WITH_OPS=1 MAX_JOBS=${MAX_JOBS:-$(nproc)} \
        "$python" setup.py bdist_wheel > "$wheels/build.log" 2>&1) &
    local builder=$! started=$SECONDS
    trap 'kill '"$builder"' 2>/dev/null' EXIT
    while kill -0 "$builder" 2>/dev/null; do
        sleep 5
        done_of=$(grep -o '^\[[0-9]*/[0-9]*\]' "$wheels/build.log" | tail -n 1) || true
        if [[ -t 1 ]]; then printf '\r[set-up] mmcv %s, %d s ' "$done_of" $((SECONDS - started))
        elif (( (SECONDS - started) % 60 < 5 )); then say "mmcv $done_of, $((SECONDS - started)) s"; fi
    done
    trap - EXIT
    [[ -t 1 ]] && echo
    wait "$builder" || fail "building mmcv failed, $wheels/build.log ends with:
$(tail -n 15 "$wheels/build.log")"
    mv "$build/dist/mmcv-$MMCV"-*.whl "$wheels/"
    rm -rf "$build"
    say "mmcv built in $((SECONDS - started)) s, kept in $wheels"
}
exec 9> "$wheels/lock"
flock 9  # a second checkout waits for the first one's wheel
if [[ -z $(wheel) ]]; then
    say "building mmcv $MMCV for $key: about 10 minutes on two cores, once per Python and torch"
    build_mmcv
fi
exec 9>&-
pip install --no-deps --no-cache-dir --force-reinstall "$(wheel)"

# ---- this project, and a look at the result ---------------------------------------------------
pip install --no-build-isolation --no-deps -e .
now=$("$python" -c 'import torch; print(torch.__version__)')
[[ $now == "$torch_version" ]] || fail "torch $torch_version was replaced by $now"
"$python" -c 'import mmcv.ops' || fail "mmcv.ops does not import: delete $wheels and run again"
echo "$wanted" > "$venv/complete"
say "ready: torch $torch_version, mmcv $MMCV with compiled ops, in .venv"
