"""A job whose every connection to the master is TLS on both sides, and whose calls bring a token."""

import json
import subprocess
import sys
from pathlib import Path

import trustme

from tests.e2e.harness import ROOT, Job, processes


def issued(authority: trustme.CA, folder: Path, address: str) -> tuple[str, ...]:
    """The flags of one who has a certificate for `address` from that authority."""
    folder.mkdir()
    certificate = authority.issue_cert(address)
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    (folder / "token").write_text("secret\n")
    files = {"--tls-cert": "cert.pem", "--tls-key": "key.pem", "--tls-ca": "ca.pem"}
    files["--token-file"] = "token"
    return tuple(word for flag, name in files.items() for word in (flag, str(folder / name)))


def test_a_job_with_tls_from_launch_to_end(job: Job) -> None:
    ours, others = trustme.CA(), trustme.CA()
    flags = issued(ours, job.folder / "ours", job.address)
    foreign = issued(others, job.folder / "foreign", job.address)
    joins = ("--rdzv-conf", "is_host=false", "--join-timeout", "3")
    job.start(*flags, "--require-token", nodes="2:3", nproc=1)
    job.start(*flags, *joins, nodes="2:3", nproc=1)
    number = job.wait_for_steps(2)
    for stranger in (
        job.start(*foreign, *joins, nodes="2:3", nproc=1),
        job.start(*joins, nodes="2:3", nproc=1, environ={"ELASTIC_JOB_TOKEN": "secret"}),
    ):
        assert stranger.exit_code() == 1, job.dump()
        said = stranger.said().splitlines()
        assert "no master answers at" in said[-1], said
        assert "do --tls-cert, --tls-key and --tls-ca fit the master's?" in said[-1], said
        assert all(line.startswith("elastic-run: ") for line in said), said
    status = elasticctl(job, *flags)
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["phase"] == "running"
    plain = elasticctl(job)
    assert plain.returncode == 1
    assert "--tls-cert, --tls-key and --tls-ca" in plain.stderr
    processes.kill(job.rank(number, 1))
    job.wait_for_steps(2, after=number)
    job.finish()
    job.ends(0, 0, 1, 1)


def elasticctl(job: Job, *flags: str) -> subprocess.CompletedProcess[str]:
    where = ("--master", f"{job.address}:{job.port}", *flags, "-o", "json", "status")
    command = [sys.executable, "-m", "elastic.ctl", *where]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
