"""Real torch: rendezvous through the launcher's store, then one sum over all ranks."""

import os

import probe
import torch
import torch.distributed as dist


def main() -> None:
    probe.warm_up()
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    probe.write(
        "sum",
        {
            "sum": total.item(),
            "launched": dist.is_torchelastic_launched(),
            "threads": torch.get_num_threads(),
            "env": {k: os.environ[k] for k in ("RANK", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE")},
            "omp": os.environ.get("OMP_NUM_THREADS"),
        },
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
