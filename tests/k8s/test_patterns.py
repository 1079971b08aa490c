"""Regular expressions of a job's rules: none may hold its master."""

import pytest

from elastic.k8s import patterns


@pytest.mark.parametrize(
    "pattern",
    [
        "CUDA error: .*", r"NCCL.*timed? out after \d+ ms", "(CUDA|NCCL) error", r"Xid.*\b(48|79)\b", r"(?i)out of mem",
        r"[(+*]+\)+", r"\(a+\)+", "(abc)+", r"(?:\d{3}-)*", "[]*(]+x", "(?P<what>a+)b", "", "a{,}", r"(a+)\*",
    ],
)  # fmt: skip
def test_these_are_taken(pattern: str) -> None:
    assert patterns.wrong(pattern) == ""


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|aa)*b", "(?:x?y)+", "((a*)b){2,}", r"(\w+\s?)*:", "(?P<a>(b+)c)+", "([(]a*)+"],
)
def test_these_may_take_for_ever(pattern: str) -> None:
    assert "for ever" in patterns.wrong(pattern)


@pytest.mark.parametrize("pattern", ["(", "a**", "[z-a]", "(?P<n>a)(?P<n>b)", "a{99999999999}"])
def test_these_are_none(pattern: str) -> None:
    assert patterns.wrong(pattern)
    assert "for ever" not in patterns.wrong(pattern)
