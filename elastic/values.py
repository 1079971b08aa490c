"""Text of a command line or an environment variable to a checked value; no I/O, no state.

A function that argparse calls (`type=`) raises `argparse.ArgumentTypeError`, to which argparse adds
the flag's name. The others raise `UsageError`, whose text names the flag.
"""

import argparse
import ipaddress
import math
import re
import signal
from collections.abc import Mapping
from urllib.parse import urlsplit

from elastic.proto.errors import UsageError
from elastic.proto.notify import is_url

Std = int | Mapping[int, int]
"""Which streams: 0 none, 1 stdout, 2 stderr, 3 both; one number for all ranks or one a local rank."""

_SUFFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_TRUE = ("1", "true", "t", "yes", "y")
_FALSE = ("0", "false", "f", "no", "n")


# What argparse calls.


def comma_separated_list(text: str) -> list[str]:
    """Split at commas, as torchrun does; a doubled comma stands for one."""
    return [item.replace("\0", ",") for item in text.replace(",,", "\0").split(",")]


def seconds(text: str) -> float:
    """A finite number of seconds that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, such as 30 or 0.5")
    return value


def notify(text: str) -> list[str]:
    """One target of `--notify`: a URL, or a shell command that nothing is known of until it runs."""
    text = text.strip()
    if not text:
        raise argparse.ArgumentTypeError("it is empty: write a URL or a shell command")
    if is_url(text):
        try:
            parts = urlsplit(text)
            fine = bool(parts.hostname) and parts.port != 0 and re.fullmatch(r"[!-~]+", text)
        except ValueError:  # of the port, or of an IPv6 address
            fine = None
        if not fine:
            raise argparse.ArgumentTypeError(
                "what begins with http is no URL, such as http://host:8080/path "
                "(it is not shown, for the secrets in it)"
            )
    elif scheme := re.match(r"[a-z][a-z0-9+.-]*://", text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(
            f"{scheme[0]}...: write an http or https URL, or a command"
        )
    return [text]


FEWEST_PORTS = 4
"""One for knocks, one for the store of a round, one for the next one's, and one that is in use."""


def port_range(text: str) -> tuple[int, int]:
    """`LO-HI`, both ends included."""
    match = re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", text)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= low <= high <= 65535:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a range of ports; write LO-HI with 1 <= LO <= HI <= 65535, "
            "such as 29500-29600"
        )
    if high - low + 1 < FEWEST_PORTS:
        raise argparse.ArgumentTypeError(f"{text!r}: a node needs {FEWEST_PORTS} ports at least")
    return low, high


def byte_size(text: str) -> int:
    """Bytes, from a number with an optional suffix K, M, G or T (powers of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes or 512M, 1G, ...")
    return int(float(match[1]) * 1024 ** _SUFFIXES[match[2]])


def labels(text: str) -> list[tuple[str, str]]:
    """`KEY=VALUE`, or several with commas between (the form for an environment variable)."""
    pairs = []
    for item in filter(None, text.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise argparse.ArgumentTypeError(f"{item!r} is no label; write KEY=VALUE")
        pairs.append((key, value))
    return pairs


# What the launcher calls once all flags are known.


def node_counts(text: str) -> tuple[int, int]:
    """Least and most nodes from torchrun's `N` or `MIN:MAX`."""
    try:
        counts = [int(part) for part in text.split(":")]
    except ValueError:
        counts = []
    if len(counts) not in (1, 2):
        raise UsageError(f"--nnodes {text!r}: write a number of nodes, or MIN:MAX")
    if counts[0] < 1:
        raise UsageError(f"--nnodes {text}: a job needs at least 1 node")
    if counts[0] > counts[-1]:
        raise UsageError(f"--nnodes {text}: the least, {counts[0]}, is above the most, {counts[1]}")
    return counts[0], counts[-1]


def nproc(text: str) -> str:
    """Ranks a node: a number from 1 up, or the name of a kind of device, to be counted later."""
    text = text.strip()
    try:
        number = int(text)
    except ValueError:
        if text.isidentifier():
            return text
        number = 0
    if number < 1:
        raise UsageError(
            f"--nproc-per-node {text!r}: write a number from 1 up, or gpu, cpu, auto, xpu"
        )
    return str(number)


def endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Host and port of `HOST[:PORT]`; an IPv6 host may stand in brackets, and has none after."""
    text = text.strip()
    host, colon, port_text = text, "", ""
    if not (text.startswith("[") and text.endswith("]")):
        head, colon, tail = text.rpartition(":")  # at the last colon, as torchrun does
        host, port_text = (head, tail) if colon else (text, "")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if colon and not (re.fullmatch(r"[0-9]{1,5}", port_text) and int(port_text) < 2**16):
        raise UsageError(f"endpoint {text!r}: the port must be a number from 0 to 65535")
    if not re.fullmatch(r"[\w.:%-]+", host):
        raise UsageError(f"endpoint {text!r}: write HOST:PORT (there is no store kept in a file)")
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise UsageError(
                f"endpoint {text!r}: write an IPv6 address in brackets, as in [::1]:29400"
            ) from None
    elif not _may_be_host(host):
        raise UsageError(f"endpoint {text!r}: {host} can be neither a name nor an address")
    return host, int(port_text) if colon else default_port


def _may_be_host(text: str) -> bool:
    """Whether it may be known as a host one day, though it is not now."""
    if re.fullmatch(r"\d+(\.\d+){3}", text):
        return all(int(part) < 256 for part in text.split("."))
    label = r"\w([\w-]*\w)?"
    try:
        return bool(re.fullmatch(rf"{label}(\.{label})*\.?", text) and text.encode("idna"))
    except UnicodeError:  # a label of more than 63 characters
        return False


def rdzv_conf(text: str) -> dict[str, str]:
    """The pairs of `--rdzv-conf K=V,K=V`; as in torchrun every key needs a value."""
    pairs: dict[str, str] = {}
    for item in text.split(",") if text.strip() else ():
        key, _, value = (part.strip() for part in item.partition("="))
        if not key:
            raise UsageError(f"--rdzv-conf {text!r}: write KEY=VALUE,KEY=VALUE")
        if not value:
            raise UsageError(f"--rdzv-conf: the key {key!r} needs a value; write {key}=VALUE")
        pairs[key] = value
    return pairs


def conf_seconds(conf: Mapping[str, str], key: str, default: float) -> float:
    """The seconds that `--rdzv-conf` gives under `key`, else `default`."""
    try:
        return seconds(conf[key]) if key in conf else default
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--rdzv-conf {key}: {error}") from None


def conf_bool(conf: Mapping[str, str], key: str) -> bool | None:
    """The truth that `--rdzv-conf` gives under `key`, in any of torchrun's words, else None."""
    word = conf.get(key, "").lower()
    if word and word not in _TRUE + _FALSE:
        raise UsageError(f"--rdzv-conf {key}={conf[key]}: write true or false")
    return word in _TRUE if word else None


def std(text: str, flag: str) -> Std:
    """Streams from `3` or `0:3,1:2`; unlike torchrun's, a local rank may have several digits."""
    if re.fullmatch(r"[0-3]", text):
        return int(text)
    if not re.fullmatch(r"[0-9]+:[0-3](,[0-9]+:[0-3])*", text):
        raise UsageError(
            f"{flag} {text!r}: write 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
            "or a map from local rank such as 0:3,1:2"
        )
    pairs = (item.split(":") for item in text.split(","))
    return {int(local_rank): int(streams) for local_rank, streams in pairs}


def local_ranks(text: str) -> frozenset[int] | None:
    """The ranks of `--local-ranks-filter`, or None where it filters nothing."""
    if not text:
        return None
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise UsageError(f"--local-ranks-filter {text!r}: write local ranks, such as 0,1,2")
    return frozenset(int(item) for item in text.split(","))


def signal_names(text: str) -> tuple[str, ...]:
    """Names of signals that a process can handle, in the order given, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in signal.Signals.__members__:
            raise UsageError(f"--signals-to-handle: there is no signal {name!r}; write SIGTERM,...")
        if name in ("SIGKILL", "SIGSTOP"):
            raise UsageError(f"--signals-to-handle: no process can handle {name}; leave it out")
    return names
