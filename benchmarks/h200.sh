#!/usr/bin/env bash
# The rows of docs/benchmarks.md that need H200s, one rank a GPU; run from the repository's root on
# a machine that has them. Usage: benchmarks/h200.sh OUT [peers]
set -u
out=$1
with_peers=${2:-}
python3 -c 'import torch; print(torch.__version__, torch.cuda.device_count(), torch.cuda.get_device_name())'
gpus=$(nvidia-smi --list-gpus | wc -l)
nvidia-smi --query-gpu=driver_version,memory.total --format=csv,noheader | head -n 1
bench() { # name, seconds, arguments
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    timeout -k 5 "$limit" python3 -m benchmarks restart --device cuda --ranks "$gpus" --out "$out/$name.json" "$@"
}
bench spares 110 --n 7 --settle 7 8 --peers ''
bench forks 90 --n 6 --settle 5 6 --peers '' --ours 'python3 -m elastic.run --spare-ranks off'
bench spares-100gib 130 --n 5 --settle 9 10 --hold-gib 100 --peers ''
if [ -n "$with_peers" ]; then
    bench peers 190 --n 5 --no-ours --peers torchrun-own-store,dlrover --dlrover-python "$(command -v python3)"
fi
