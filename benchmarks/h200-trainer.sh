#!/usr/bin/env bash
# The trainer's rows of docs/benchmarks.md on all GPUs of a machine, in parts of less than ten minutes each; run from
# the repository's root. Usage: benchmarks/h200-trainer.sh OUT PART...; parts: head adding profile bubble memory tests mfu mfu-32 exact
# saving large scaling tensor resize fire restart curve layouts; curve needs what `python -m benchmarks.curve prepare runs/text`
# made.
out=$1
shift
. "$(dirname "$0")/h200-parts.sh"
halves=()
[ "$gpus" -ge 4 ] && halves=(--tensor-model-parallel-size=$((gpus / 2)) --sequence-parallel)
for name in "$@"; do
    case $name in
        head) part head 100 python3 -m benchmarks.head; part attention 100 python3 -m benchmarks.attention ;;
        profile)
            for kind in fast exact; do
                part "profile-$kind" 100 python3 -m elastic.run --standalone --nproc-per-node=1 \
                    -m elastic.trainer.pretrain_gpt --num-layers=12 --hidden-size=768 --num-attention-heads=12 \
                    --seq-length=2048 --micro-batch-size=16 --global-batch-size=64 --mock-data --vocab-size=50303 \
                    --hidden-dropout=0 --attention-dropout=0 --bf16 --compile --reduction=$kind --lr=1e-4 \
                    --train-iters=8 --log-interval=4 --eval-iters=0 --profile --use-pytorch-profiler \
                    --profile-step-start=5 --profile-step-end=7 --tensorboard-dir="$out/board-$kind"
                part "kernels-$kind" 60 python3 -m benchmarks.kernels --most 80 "$out/board-$kind"/*.json.gz
                rm -rf "$out/board-$kind"
            done
            ;;
        memory)
            for kind in fast-zero1 exact-zero3 fast-tp2 exact-tp2 fast-pp2 compiled-tp2-sp; do
                part "memory-$kind" 150 python3 -m benchmarks.memory --match "$kind" --out "$out/memory.jsonl"
            done
            ;;
        bubble) part bubble 200 python3 -m benchmarks.bubble ;;
        mfu) part mfu 400 python3 -m benchmarks.mfu 125m 125m-1024 --out "$out/mfu.jsonl" ;;
        mfu-32) part mfu-32 580 python3 -m benchmarks.mfu 125m 125m-1024 --leaves 32 --out "$out/mfu.jsonl" ;;
        exact) part exact-32 290 python3 -m benchmarks.mfu 125m --ranks "$gpus" --no-plain --leaves 32 --out "$out/mfu.jsonl" ;;
        tests) part tests 300 python3 -m pytest -m gpu -v tests/trainer ;;
        saving) part saving 200 python3 -m benchmarks.mfu 125m --no-plain --saving --out "$out/mfu.jsonl" ;;
        adding) part adding 100 python3 -m benchmarks.adding ;;
        large)
            part large-1.3b 290 python3 -m benchmarks.mfu 1.3b --out "$out/mfu.jsonl"
            # In exact mode 6.7B's gradients of 8 bytes have no room beside it.
            part large-6.7b 580 python3 -m benchmarks.mfu 6.7b --leaves 32 --reductions fast --out "$out/mfu.jsonl"
            ;;
        resize)
            part resize 420 python3 -m benchmarks.resize $([ "$gpus" -ge 4 ] || echo --worlds "$gpus" 1 "$gpus" --steps 60) \
                --out "$out/resize.json"
            ;;
        scaling)
            for ranks in 1 "$gpus"; do
                part "scaling-$ranks" 290 python3 -m benchmarks.mfu 125m 1.3b --ranks "$ranks" --no-plain \
                    --out "$out/scaling.jsonl"
            done
            ;;
        tensor) # 6.7B over all GPUs by TP, and by TP x PP, or PP where there are two
            # As many samples a step in fewer leaves: one sample's kernels, cut by TP, end before the host has queued the next.
            part tensor-tp 290 python3 -m benchmarks.mfu 6.7b --ranks "$gpus" --no-plain --reductions fast \
                --out "$out/mfu.jsonl" --tensor-model-parallel-size="$gpus" --sequence-parallel --micro-batch-size="$gpus"
            part tensor-tp-pp 290 python3 -m benchmarks.mfu 6.7b --ranks "$gpus" --no-plain --reductions fast \
                --out "$out/mfu.jsonl" --pipeline-model-parallel-size=2 "${halves[@]}"
            ;;
        fire)
            part fire 420 python3 -m benchmarks.resize --worlds "$gpus" "$gpus" "$gpus" --steps 60 --leaves 8 \
                --out "$out/fire.json" --pipeline-model-parallel-size=2 "${halves[@]}"
            ;;
        restart) # with each rank's quarter of the optimizer; then once with all of it, and what NCCL's start is made of
            whole=(1.3b --micro-batch-size=4 --global-batch-size=$((32 * gpus)) --out "$out/restart.jsonl")
            part restart 400 python3 -m benchmarks.trainer_restart "${whole[@]}" --kills 4 --use-distributed-optimizer
            NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%p \
                part restart-whole 180 python3 -m benchmarks.trainer_restart "${whole[@]}" --kills 1
            grep -h "Init timings" /tmp/nccl.* | tail -n "$((2 * gpus))" | tee "$out/nccl.txt"
            ;;
        curve) part curve 590 python3 -m benchmarks.curve run runs/text "$out/curve" --gpus "$gpus" ;;
        layouts) part layouts 580 python3 -m benchmarks.layouts --out "$out/layouts.json" ;;
        *) echo "no part $name" ;;
    esac
done
