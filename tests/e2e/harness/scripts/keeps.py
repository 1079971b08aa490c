"""A rank that saves a tensor of one number each step, without a process group and without elastic-run.

    keeps.py FOLDER CASE

Steps follow lines on its standard input; what a save or a load raises ends it, in one line.
"""

import os
import resource
import sys
from pathlib import Path

import torch

from elastic.checkpoint import Checkpointer
from elastic.checkpoint.keeper import places
from elastic.proto.errors import ElasticError

FOLDER, CASE = Path(sys.argv[1]), sys.argv[2]


def main() -> None:
    if CASE == "absent":  # rank 0 comes alone
        places.TIMEOUT = 2.0
        if os.environ["RANK"] != "0":
            sys.stdin.readline()
            return
    if CASE == "files":  # more than `select` can name
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 2048), most))
        opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        assert opened[-1] > 1024
    checkpoint = Checkpointer(FOLDER / "checkpoint")
    state = {"number": torch.zeros(1000)}
    step = checkpoint.load(state)
    print("loaded", step, int(state["number"][0]), flush=True)
    if CASE == "fork" and os.fork() == 0:
        sys.stdin.close()
        os.read(os.open(FOLDER / "pipe", os.O_RDONLY), 1)  # outlives its parent
        os._exit(0)
    while line := sys.stdin.readline():
        if line == "again\n":
            checkpoint.close()
            checkpoint = Checkpointer(FOLDER / "checkpoint")
            state["number"].zero_()
            step = checkpoint.load(state)
            print("loaded", step, int(state["number"][0]), flush=True)
        else:
            step += 1
            state["number"].fill_(step)
            checkpoint.save(step, state, persist=line == "persist\n")
            print("saved", step, flush=True)
            checkpoint.wait(60)


try:
    main()
except ElasticError as error:
    sys.exit(f"{type(error).__name__}: {error}")
