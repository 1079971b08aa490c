"""`elastic-run` in plain pods that find one another by a Service's name, without an ElasticJob."""

from pathlib import Path

import pytest

from elastic.proto.ending import Ended, from_json
from tests.k8s.cluster import Cluster, free_port
from tests.waiting import wait_for

SCRIPT = """
import sys, time, torch, torch.distributed as dist
from pathlib import Path
from elastic.checkpoint import Checkpointer

dist.init_process_group("gloo")
step = torch.zeros(1, dtype=torch.int64)
state = {"step": step}
checkpoint = Checkpointer(sys.argv[1])
start = checkpoint.load(state)
for now in range(start, 10**9):
    dist.all_reduce(step, op=dist.ReduceOp.MAX)
    step += 1
    if dist.get_rank() == 0:
        with open(sys.argv[2], "a") as out:
            print(dist.get_world_size(), file=out)
    checkpoint.save(now + 1, state)
    last = torch.tensor(int(Path(sys.argv[3]).exists()))
    dist.all_reduce(last, op=dist.ReduceOp.MAX)
    if last:
        break
    time.sleep(0.02)
dist.destroy_process_group()
"""


def test_two_pods_train_and_a_third_takes_the_place_of_a_deleted_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    script, out, stop = (tmp_path / name for name in ("train.py", "out", "stop"))
    script.write_text(SCRIPT)
    selector = {"selector": {"place": "zero"}, "clusterIP": "None", "ports": [{"port": 1}]}
    cluster.namespace.client.create(
        cluster.namespace.path("services"),
        {"metadata": {"name": "job"}, "spec": {**selector, "publishNotReadyAddresses": True}},
    )

    port = free_port()

    def start(name: str, *, host: bool) -> None:
        ip = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        env = [ip, {"name": "GLOO_SOCKET_IFNAME", "value": "lo"}]
        cluster.start(
            name, "elastic-run", "--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-id=job",
            f"--rdzv-endpoint=job:{port}", f"--rdzv-conf=is_host={int(host)}", "--local-addr=$(IP)",
            "--precheck=off", f"--node-id={name}", str(script),
            str(tmp_path / "ckpt"), str(out), str(stop),
            container={"env": [*env, {"name": "OMP_NUM_THREADS", "value": "1"}]},
            labels={"place": "zero" if host else "other"},
        )  # fmt: skip

    def worlds() -> list[str]:
        """World sizes, in the order of the steps."""
        text = out.read_text() if out.exists() else ""
        sizes = text.splitlines()
        return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] != size]

    start("zero", host=True)
    start("first", host=False)
    wait_for("two train", lambda: "2" in worlds())
    cluster.namespace.client.delete(cluster.namespace.path("pods", "first"))
    wait_for("one trains on", lambda: worlds()[-1] == "1")
    cluster.wait_gone("first")
    start("second", host=False)
    wait_for("two train again", lambda: worlds()[-1] == "2")
    stop.touch()
    for name in ("zero", "second"):
        cluster.wait_phase(name, "Succeeded")


@pytest.mark.parametrize(
    ("flags", "body", "code", "kind"),
    [
        (("--standalone",), "raise ValueError('no')", 1, Ended.USER_ERROR),
        (("--nnodes=2", "--rdzv-conf=is_host=true,join_timeout=0.5", "--rdzv-backend=c10d",
          "--rdzv-endpoint=$(IP):$(PORT)"), "", 214, Ended.RENDEZVOUS_TIMEOUT),
        (("--require-token",), "", 2, Ended.USAGE),
        (("--no-such-flag",), "", 2, Ended.USAGE),
    ],
)  # fmt: skip
def test_why_it_ended_is_in_the_pods_status(
    cluster: Cluster, tmp_path: Path, flags: tuple[str, ...], body: str, code: int, kind: Ended
) -> None:
    script = tmp_path / "script.py"
    script.write_text(body)
    ip = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    cluster.start("ends", "elastic-run", "--exit-codes=detailed", *flags, str(script),
                  container={"env": [ip, {"name": "PORT", "value": str(free_port())}]})  # fmt: skip
    pod = cluster.wait_phase("ends", "Failed")
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    told = from_json(ended.get("message", ""))
    assert told is not None, cluster.log("ends")
    assert (ended["exitCode"], told.kind) == (code, kind)
