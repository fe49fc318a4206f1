#!/usr/bin/env bash
# A quarter of an hour on one GPU without a network, in the order of value. Two commands, in a checkout:
#
#   OUT=folder bash tests/gpu/sitting.sh one    590 s: an 8B shape on the card, in host memory, twelve layers beside peers
#   OUT=folder bash tests/gpu/sitting.sh two    what is left, at least 150 s: tests, the same twelve layers beside DeepSpeed, watched passes
#
# `make gpu SITTING=one` does the same. SITTING_PACKAGES (.whl by default) is a folder that holds wheels for the packages that
# the machine lacks, and the native module. docs/gpu.md says what a part shows.
set -u
export PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 HF_HUB_OFFLINE=1 COLUMNS=150 TORCH_EXTENSIONS_DIR=/tmp/ext
T0=$SECONDS
OUT=${OUT:-build}
PACKAGES=${SITTING_PACKAGES:-.whl}
PYTHON=${PYTHON:-python3}
RUNS=/tmp/runs
mkdir -p "$OUT"

say() { echo "== $((SECONDS - T0))s $*" | tee -a "$OUT/log"; }

left() { echo $((${LIMIT:-590} - SECONDS + T0)); }

# train NAME SECONDS OPTIONS: a training whose figures and phases come back.
train() {
    local name=$1 limit=$2 program=(tiermem.tools.cli train)
    shift 2
    [ "$name" = peers12 ] && program=(bench peers)
    timeout "$limit" "$PYTHON" -m "${program[@]}" --config /tmp/8b.json --seq 2048 --checkpointing \
        --json "/tmp/$name.json" --runs "$RUNS/$name" "$@" >"/tmp/$name.log" 2>&1
    say "$name rc $?"
    grep -v '^$' "/tmp/$name.log" | tail -25 | tee -a "$OUT/log"
}

# Everything that was written, in one file: few files come back from such a machine.
keep() {
    (cd /tmp && tar czf "$OUT/$1.tar.gz" ./*.log ./*.json runs/*/*/run.json runs/*/*/*/*/*.log 2>/dev/null)
    say "kept $1"
}

"$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site "$PACKAGES"/*.whl \
    && cp "$PACKAGES"/*.so /tmp/site/ || exit 1
export PYTHONPATH=$PWD/tests/gpu/start:/tmp/site:$PWD:$PWD/tests
say "installed"
nvidia-smi -L | tee -a "$OUT/log"
nproc
grep MemAvail /proc/meminfo
"$PYTHON" - <<'P'
from tiermem.tools.presets import preset
import json
json.dump(preset("8b"), open("/tmp/8b.json", "w"))
P

build_deepspeed() {
    nice -n 19 env MAX_JOBS=4 timeout 400 "$PYTHON" -c "
import deepspeed
from deepspeed.ops.op_builder import CPUAdamBuilder
CPUAdamBuilder().load(verbose=False)
print('cpu_adam is ready')" >/tmp/jit.log 2>&1 &
    JIT=$!
}

# peers12 SECONDS: twelve layers (3.7 B parameters): FSDP2 and DeepSpeed need 16 to 18 bytes a parameter of host memory.
peers12() {
    wait $JIT
    say "jit: $(tail -1 /tmp/jit.log)"
    train peers12 "$1" --layers 12 --offload cpu --batch 8 --steps 4 --peer-python "$(which "$PYTHON")"
}

build_deepspeed
if [ "$1" = one ]; then
    mem=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -1)
    card="--states compact --batch 8"
    [ "$mem" -lt 100000 ] && card="--states tiny --batch 2"
    TIERMEM_TRACE_STEP=6 train device8 150 --offload none --steps 6 $card
    TIERMEM_TRACE_STEP=6 train host8 190 --offload cpu --states compact --batch 8 --steps 6
    keep one
    peers12 $(($(left) - 15))
    keep one
else
    timeout 140 "$PYTHON" -m pytest -q -p no:cacheprovider -n 8 --timeout 100 tests/gpu -m gpu >/tmp/pytest.log 2>&1
    tail -8 /tmp/pytest.log | tee -a "$OUT/log"
    say "pytest"
    keep two
    export SITTING_PEERS=deepspeed
    peers12 $(($(left) - 60))
    keep two
    timeout $(($(left) - 8)) "$PYTHON" -m bench.gpu --part passes --width 256 --blocks 3 --samples 32 --steps 3 \
        --json /tmp/passes.json 2>&1 | tee -a "$OUT/log"
    say "passes"
    keep two
fi
say end
