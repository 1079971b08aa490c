"""Amounts as Kubernetes writes them: 500m, 1Gi, 2."""

_UNITS = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip


def amount(text: str | float) -> float:
    """In the plain unit: cores, bytes, pieces."""
    words = str(text)
    number = words.rstrip("".join(sorted(set("".join(_UNITS)))))
    return float(number) * _UNITS[words[len(number) :]]
