#!/usr/bin/env bash
# The rows of docs/benchmarks.md on nodes that are tried, ranks that hang and GPUs that are slow, on all GPUs of a machine;
# run from the repository's root. Usage: benchmarks/h200-health.sh OUT PART...; parts: probes pairs hangs slow tests.
out=$1
shift
. "$(dirname "$0")/h200-parts.sh"
pairs() { # so many nodes, each with its part of the GPUs
    local node each=$((gpus / $1)) common=(--nnodes "$1" --rdzv-endpoint "127.0.0.1:2951$1")
    for ((node = $1 - 1; node >= 0; node--)); do
        CUDA_VISIBLE_DEVICES=$(seq -s, $((node * each)) $((node * each + each - 1))) \
            python3 -m elastic.ctl probe "${common[@]}" >"$out/pairs-$1-$node.txt" &
    done
    time wait
    cat "$out/pairs-$1"-*.txt
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
            for nodes in "$gpus" $((gpus / 2)); do part "pairs-$nodes" 120 bash -c "pairs $nodes"; done
            ;;
        hangs) part hangs 300 python3 -m benchmarks.hangs named --device cuda --hangs 12 ;;
        slow) part slow 420 python3 -m benchmarks.stragglers --device cuda --gpu 2 --host 1 --clean 1 ;;
        tests)
            part tests 300 python3 -m pytest -m gpu -q tests/agent tests/e2e/test_stragglers.py tests/e2e/test_gpus.py
            ;;
        *) echo "no part $name" ;;
    esac
done
