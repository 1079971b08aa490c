# Sourced by the scripts beside it: the machine, and how a part of theirs is run. Expects $out.
set -u
gpus=$(nvidia-smi --list-gpus | wc -l)
python3 -c 'import torch; print(torch.__version__, torch.cuda.device_count(), torch.cuda.get_device_name())'
part() { # name, seconds, command
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    timeout -k 5 "$limit" "$@" 2>"$out/$name.stderr" | tee "$out/$name.txt"
}
