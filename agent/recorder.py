"""Inside the user's process: which collective each of its process groups has issued last, for its agent.

torch's flight recorder knows, also of what DTensor and compiled code issue, and only this process can
read it. A thread does, once it is asked: it waits without the GIL, costs nothing meanwhile, and where it
does not answer, the process is stopped or something holds the GIL, which is an answer, too. It begins
with the first process group, which has threads of its own, so no script gets its first thread by us.
"""

import contextlib
import functools
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

    from elastic.agent.hook import Attachment

C10D = "torch.distributed.distributed_c10d"
NCCL = "_dump_nccl_trace_json"
DATAGRAM = 1 << 16
"""Bytes of an answer at most."""
MOST_GROUPS = 64
"""Whose last collective is told."""


def follow(attachment: "Attachment") -> None:
    """Offer the agent to be asked, once the script makes a process group. torch.distributed is imported."""
    module: Any = sys.modules[C10D]
    make = module._new_process_group_helper

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        group = make(*args, **kwargs)
        if module._new_process_group_helper is made:
            module._new_process_group_helper = make
        with contextlib.suppress(Exception):
            _offer(attachment)
        return group

    module._new_process_group_helper = made


def _offer(attachment: "Attachment") -> None:
    import os
    import socket
    import threading

    from elastic.proto.link import RecorderOffered

    if attachment.page.pid != os.getpid():
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        if attachment.send(RecorderOffered(), (theirs.fileno(),)):
            threading.Thread(
                target=_serve, args=(ours,), name="elastic-recorder", daemon=True
            ).start()


def _serve(end: "socket.socket") -> None:
    with contextlib.suppress(OSError), end:
        while end.recv(1):
            end.send(json.dumps(last_collectives()).encode())


def last_collectives() -> list[dict[str, Any]]:
    """Of each process group, the collective and the send or receive issued last: {group, seq, op, ...}."""
    library = sys.modules.get("torch._C._distributed_c10d")
    last: dict[tuple[str, str, bool], dict[str, Any]] = {}
    for name in (NCCL, "_dump_fr_trace_json"):
        if dump := getattr(library, name, None):
            for entry in json.loads(dump(True, False)).get("entries", ()):
                last[entry["process_group"][0], name, bool(entry.get("is_p2p"))] = entry
    return [
        {
            "": "Collective",
            "group": str(group)[:64],
            "seq": int(entry["collective_seq_id"]),
            "op": str(entry["profiling_name"])[:64],
            "sizes": str(entry["input_sizes"])[:128],
            "p2p": p2p,
            "device": name == NCCL,
            "started": entry.get("state") != "scheduled",
            "done": bool(entry.get("retired")) or entry.get("state") == "completed",
        }
        for (group, name, p2p), entry in list(last.items())[-MOST_GROUPS:]
    ]
