#!/usr/bin/env bash
# The rows of docs/benchmarks.md on nodes that are tried, ranks that hang and GPUs that are slow, on all GPUs of a machine;
# run from the repository's root. Usage: benchmarks/h200-health.sh OUT PART...; parts: probes pairs hangs slow tests.
out=$1
shift
. "$(dirname "$0")/h200-parts.sh"
pairs() { # as many nodes as there are GPUs, each with one of them
    local node
    for ((node = 1; node < gpus; node++)); do
        CUDA_VISIBLE_DEVICES=$node python3 -m elastic.ctl probe --nnodes "$gpus" --rdzv-endpoint 127.0.0.1:29511 >"$out/pairs-$node.txt" &
    done
    time CUDA_VISIBLE_DEVICES=0 python3 -m elastic.ctl probe --nnodes "$gpus" --rdzv-endpoint 127.0.0.1:29511
    wait
}
for name in "$@"; do
    case $name in
        probes)
            part probes 150 python3 -m benchmarks probes --n 5 --out "$out/probes.json"
            part timeline 40 python3 -m elastic.ctl probe -v
            ;;
        pairs)
            export -f pairs
            export gpus out
            part pairs 120 bash -c pairs
            ;;
        hangs) part hangs 300 python3 -m benchmarks.hangs named --device cuda --hangs 12 ;;
        slow) part slow 420 python3 -m benchmarks.stragglers --device cuda --gpu 2 --host 1 --clean 1 ;;
        tests)
            part tests 300 python3 -m pytest -m gpu -q tests/agent/test_device_times.py tests/e2e/test_stragglers.py \
                tests/e2e/test_gpus.py
            ;;
        *) echo "no part $name" ;;
    esac
done
