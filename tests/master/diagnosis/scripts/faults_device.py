"""What goes wrong on a CUDA device."""

import argparse

import torch

Args = argparse.Namespace
GIB = 1 << 30


def out_of_memory(args: Args) -> None:
    """Little by little, or at once; as a model, or as one of its steps."""
    if args.variant:
        torch.zeros(400 * GIB, dtype=torch.uint8, device="cuda")
    kept = []
    while True:
        kept.append(torch.zeros(4 * GIB, dtype=torch.uint8, device="cuda"))


def index_out_of_range(args: Args) -> None:
    if args.variant:
        logits = torch.randn(8, 16, device="cuda", requires_grad=True)
        target = torch.full((8,), 16, device="cuda")
        loss = torch.nn.functional.cross_entropy(logits, target)
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        words = torch.nn.Embedding(64, 16, device="cuda")
        words(torch.tensor([3, 64], device="cuda"))
    torch.cuda.synchronize()


def illegal_access(args: Args) -> None:
    from kernels import far  # type: ignore[import-not-found]

    values = torch.zeros(64, device="cuda")
    far[(1,)](values, 1 << 44)
    torch.cuda.synchronize()
