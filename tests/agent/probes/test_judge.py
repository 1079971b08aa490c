"""Figures to verdicts."""

import pytest

from elastic.agent.probes import judge
from elastic.agent.probes.answers import Answer, decode, encode
from elastic.agent.probes.verdicts import (
    NodeVerdict,
    ProbeVerdict,
    compared,
    fewer_links,
    odd_checksums,
    of_answer,
)
from elastic.proto.errors import CodecError

BUS = "00000000:3B:00.0"


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"recovery_action": 1.0}, "a reset of the GPU"),
        ({"recovery_action": 2.0}, "a reboot of the node"),
        ({"recovery_action": 99.0}, "action 99"),
        ({"ecc_uncorrected": 2.0}, "2 uncorrected ECC errors"),
        ({"remap_pending": 1.0}, "waits for a reset"),
        ({"remap_failed": 1.0, "recovery_action": 0.0}, "could not be remapped"),
        ({"clock_event_reasons": float(0x08)}, "hardware slowdown"),
        ({"clock_event_reasons": float(0x40 | 0x01)}, "hardware thermal slowdown"),
        ({"xid": 79.0, "xid_age_s": 12.0}, "Xid 79 in the kernel log 12 s ago"),
    ],
)
def test_a_sick_gpu(figures: dict[str, float], words: str) -> None:
    assert words in judge.gpu(figures)


@pytest.mark.parametrize(
    "figures",
    [
        {},
        {"recovery_action": 0.0, "ecc_uncorrected": 3.0, "remap_pending": 1.0},
        {"ecc_uncorrected": 0.0, "ecc_uncorrected_ever": 5.0, "remap_failed": 0.0},
        {"clock_event_reasons": float(0x01 | 0x04 | 0x20)},
        {"xid": 79.0, "xid_age_s": 7200.0},
        {"xid": 79.0, "xid_age_s": 12.0, "recovery_action": 0.0},
        {"xid": 0.0},
    ],
)
def test_a_gpu_that_can_be_used(figures: dict[str, float]) -> None:
    """Where the driver names its recovery action, that has the last word on what it counted."""
    assert not judge.gpu(figures)


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"free_bytes": 1e6}, "the machine has 1 MiB of memory left"),
        ({"cgroup_free_bytes": 0.0}, "our cgroup has 0 MiB"),
        ({"stalled_percent": 80.0}, "all of the machine waited for memory in 80 %"),
        ({"cgroup_stalled_percent": 51.0}, "all of our cgroup waited"),
        ({"free_bytes": 1e9, "stalled_percent": 3.0, "waited_percent": 90.0}, ""),
        ({}, ""),
    ],
)
def test_memory(figures: dict[str, float], words: str) -> None:
    said = judge.memory(figures)
    assert words in said
    assert bool(said) == bool(words)


LOG = """\
6,100,5000000,-;usb 1-1: new device
3,101,7000000,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=9, name=python, Ch 8, MMU Fault
3,102,8000000,-;NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', An uncorrectable double bit error
3,103,9000000,-;NVRM: Xid (PCI:0000:86:00): 79, pid=9, GPU has fallen off the bus.
 SUBSYSTEM=pci
"""


def test_the_newest_hardware_xid_of_a_gpu() -> None:
    assert judge.last_xid(LOG, BUS, uptime=20.0) == (48, 12.0)
    assert judge.last_xid(LOG, "00000000:86:00.0", uptime=20.0) == (79, 11.0)
    assert judge.last_xid(LOG, "00000000:AF:00.0", uptime=20.0) is None


def test_only_a_majority_makes_a_checksum_odd() -> None:
    assert odd_checksums({"gpu0": 1.0, "gpu1": 2.0, "gpu2": 1.0}).keys() == {"gpu1"}
    assert not odd_checksums({"gpu0": 1.0, "gpu1": 2.0})
    assert not odd_checksums({"gpu0": 1.0})
    assert not odd_checksums({})


def test_a_gpu_with_fewer_links_than_its_siblings() -> None:
    said = {"gpu1": "17 NVLinks are active, another GPU has 18"}
    assert fewer_links({"gpu0": 18.0, "gpu1": 17.0}, switched=False) == said
    assert not fewer_links({"gpu0": 0.0, "gpu1": 0.0}, switched=True)
    cards = {"gpu0": 4.0, "gpu1": 4.0, "gpu2": 0.0}
    assert not fewer_links(cards, switched=False), "a bridge joins two of three cards"
    assert fewer_links(cards, switched=True).keys() == {"gpu2"}


def verdict(probe: str, device: str, **figures: float) -> ProbeVerdict:
    return ProbeVerdict(probe=probe, device=device, state="ok", figures=figures)


def test_siblings_are_compared() -> None:
    found = compared(
        [
            *(verdict("matmul", f"gpu{at}", checksum=5.0 + (at == 2)) for at in range(4)),
            *(verdict("nvml", f"gpu{at}", nvlinks_active=18.0 - (at == 1)) for at in range(4)),
        ]
    )
    bad = [(one.probe, one.device) for one in found if one.state == "faulty"]
    assert bad == [("matmul", "gpu2"), ("nvml", "gpu1")]


def test_what_nobody_knows_is_no_fault() -> None:
    unknown = of_answer(Answer(probe="nvml", ok=True, what="no driver"), "gpu0")
    good = of_answer(Answer(probe="disk", ok=True, figures={"free_bytes": 1.0}), "/tmp")
    bad = of_answer(Answer(probe="disk", ok=False, what="EIO"), "/data")
    assert [one.state for one in (unknown, good, bad)] == ["unknown", "ok", "faulty"]
    assert NodeVerdict(level="quick", probes=(unknown,), seconds=0.0).state == "unknown"
    assert NodeVerdict(level="quick", probes=(unknown, good), seconds=0.0).state == "ok"
    node = NodeVerdict(level="quick", probes=(unknown, good, bad), seconds=0.0)
    assert node.state == "faulty"
    assert node.what == "disk: /data: EIO"


@pytest.mark.parametrize("parts", [{}, {"context": (3.5, 4.25), "sum": (4.25, 4.5)}])
def test_an_answer_is_read_as_it_was_said(parts: dict[str, tuple[float, float]]) -> None:
    answer = Answer(probe="device", ok=True, figures={"two": 2.0}, parts=parts)
    assert decode(encode(answer).encode()) == answer


@pytest.mark.parametrize("parts", ["3", "[]", '{"sum": 3}', '{"sum": [3]}', '{"sum": [3, "x"]}'])
def test_parts_that_are_none(parts: str) -> None:
    line = f'{{"probe": "device", "ok": true, "what": "", "figures": {{}}, "parts": {parts}}}'
    with pytest.raises(CodecError, match="which is no answer"):
        decode(line.encode())
