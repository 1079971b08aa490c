"""Whether data-parallel replicas hold the same bits, and which rank does not: a guard against silent corruption.

    from elastic import replicas

    if step % 100 == 0:
        found = replicas.compare(replicas.tensors(model, optimizer))
        if found is not None:
            checkpoint.distrust(step - 100, str(found), found.suspects)   # the last step that was compared
            raise SystemExit(f"step {step}: {found}")

What replicas compute from the same gradients is the same to the bit, on devices of one kind, so one bit that is not
is a fault: of a device, its memory, or the way to it. Each rank sums its own bits up, where they are; two numbers a
rank pass between them, and only where these differ a number for each tensor.
"""

import hashlib
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastic.proto.errors import UsageError

_ROW = 1 << 18
"""64-bit words that are summed up by themselves."""
_ROWS = 32
"""Rows that a device other than a CPU, whose caches are small, takes at once."""
_PLACE = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
"""Odd numbers, SplitMix64's: multiplying by them loses nothing, modulo 2^64."""
_NAME = 64
"""Bytes of a node's name that are sent."""
_FEW = 3
"""Tensors, and ranks, in a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Odd:
    """A rank that does not hold what most hold."""

    rank: int
    node: str
    """Its host's name."""
    tensors: tuple[str, ...]
    """Of which."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """What is not the same in all replicas. As text, one sentence that names whoever can be named."""

    ranks: Mapping[int, str]
    """Those that were compared, and their nodes."""
    odd: tuple[Odd, ...]
    """Those that are not as most are."""
    undecided: tuple[str, ...]
    """Tensors of which no more than half of the ranks hold the same."""

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks that may be wrong: those that can be named, else all that were compared."""
        return tuple(self.ranks) if self.undecided else tuple(one.rank for one in self.odd)

    def __str__(self) -> str:
        said = [
            f"{one} does not hold what {_most(len(self.ranks), self.odd, one)} of "
            f"{len(self.ranks)} replicas hold of {_named(one.tensors)}"
            for one in self.odd[:_FEW]
        ]
        if len(self.odd) > _FEW:
            said.append(f"nor do {len(self.odd) - _FEW} more ranks")
        if self.undecided:
            who = _listed([f"rank {rank} on {node}" for rank, node in self.ranks.items()])
            why = (
                "of two that differ nobody can say which is wrong"
                if len(self.ranks) == 2
                else "no more than half of them hold the same, so nobody can say which are wrong"
            )
            said.append(f"{who} differ in {_named(self.undecided)}: {why}")
        return "; ".join(said)


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """What replicas have in common, by name: parameters, and what `optimizer` keeps of each on the same device, as
    "NAME exp_avg". What is kept elsewhere, as moments in host memory, is left out: looking at it takes too long."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for what, value in state.items():
            if isinstance(value, Tensor) and value.device == parameter.device:
                found[f"{name} {what}"] = value
    return found


@torch.no_grad()
def compare(
    found: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> Difference | None:
    """What of `found` is not the same bits on all ranks of `group`, which all call it; None: nothing.

    group: ranks that hold the same by construction: with DDP the world, which is the default; with HSDP those along the
    mesh's dimension of replicas, since of a DTensor a rank's own part is compared. Raises UsageError where a tensor is
    sharded over ranks of the group, so that nobody has it twice, and where ranks give others.
    """
    _check_sharding(found, group)
    return compare_sums({name: checksum(one) for name, one in found.items()}, group)


def compare_sums(
    sums: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> Difference | None:
    """As `compare`, of tensors that need not be there at the same time; sums: the `checksum` of each."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    own = torch.stack([one.to(device) for one in sums.values()]) if sums else _empty(device)
    names = hashlib.sha256("\n".join(sums).encode()).digest()
    digest = torch.tensor([int.from_bytes(names[:7], "little")], device=device)
    rows = _gathered(torch.cat((digest, checksum(own).view(1))), group)
    if any(row[0] != rows[0][0] for row in rows):
        raise UsageError("ranks that are compared give other tensors: give all the same names")
    if all(row == rows[0] for row in rows):
        return None
    name = socket.gethostname().encode()[:_NAME].ljust(_NAME, b"\0")
    sent = torch.frombuffer(bytearray(name), dtype=torch.uint8).view(torch.int64)
    table = _gathered(torch.cat((sent.to(device), own)), group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    words = _NAME // 8
    nodes = [_text(row[:words]) for row in table]
    return judge(tuple(sums), dict(zip(ranks, nodes, strict=True)), [row[words:] for row in table])


def judge(
    names: Sequence[str], ranks: Mapping[int, str], table: Sequence[Sequence[int]]
) -> Difference | None:
    """Who differs in what. ranks: and their nodes; table: of each rank a number for each of `names`. Pure."""
    odd: dict[int, list[str]] = {}
    undecided = []
    for name, column in zip(names, zip(*table, strict=True), strict=True):
        most, count = Counter(column).most_common(1)[0]
        if 2 * count <= len(column):
            undecided.append(name)
            continue
        for rank, value in zip(ranks, column, strict=True):
            if value != most:
                odd.setdefault(rank, []).append(name)
    if not odd and not undecided:
        return None
    return Difference(
        ranks=ranks,
        odd=tuple(
            Odd(rank=rank, node=ranks[rank], tensors=tuple(odd[rank])) for rank in sorted(odd)
        ),
        undecided=tuple(undecided),
    )


# --- sums of bits --------------------------------------------------------------------------------


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Of a tensor's bits and their places, or of this rank's part of a DTensor: int64 [], where it is.

    Each 64 bits are mixed with their place, one to one, and added up modulo 2^64: in any order that is the same, and
    whatever is wrong within 64 bits changes it for certain. Else two tensors have the same by chance alone.
    """
    found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = found.detach().contiguous().view(-1).view(torch.uint8)
    places = _places(flat.device)
    sums = [_mixed(words, places[: words.shape[1]]).sum(dim=1) for words in _words(flat)]
    rows = torch.cat(sums) if sums else _empty(flat.device)
    return sum(
        (
            _mixed(some.view(1, -1), places[: len(some)]).sum() * (2 * number + 1)
            for number, some in enumerate(torch.split(rows, _ROW))
        ),
        start=torch.zeros((), dtype=torch.int64, device=flat.device),
    )


@cache
def _places(device: torch.device) -> Tensor:
    """What the words of a row are told apart by, [_ROW]: 2 MB, kept, since most tensors are smaller than that."""
    return torch.arange(1, _ROW + 1, device=device) * _PLACE


def _words(flat: Tensor) -> Iterator[Tensor]:
    """Bytes, [n], as 64-bit words in rows, several at a time: int64 [rows, _ROW], the last one shorter."""
    row = _ROW * 8
    rows = 1 if flat.device.type == "cpu" else _ROWS
    whole = len(flat) // row * row
    for at in range(0, whole, row * rows):
        yield _aligned(flat[at : min(at + row * rows, whole)]).view(torch.int64).view(-1, _ROW)
    if rest := len(flat) - whole:
        padded = nn.functional.pad(flat[whole:], (0, -rest % 8))
        yield _aligned(padded).view(torch.int64).view(1, -1)


def _aligned(part: Tensor) -> Tensor:
    """As a view of another type wants it."""
    return part if part.storage_offset() % 8 == 0 else part.clone()


def _mixed(words: Tensor, places: Tensor) -> Tensor:
    """Each word, one to one, to one that looks like any other. words: [rows, n]; places: [n]."""
    mixed = words + places
    halves = mixed.view(torch.int32).view(*mixed.shape, 2)
    for factor in _MIX:
        mixed *= factor
        halves[..., 0] ^= halves[..., 1]  # the upper ones, which hang on all, on the lower ones
    return mixed


def _empty(device: torch.device) -> Tensor:
    return torch.zeros(0, dtype=torch.int64, device=device)


# --- what passes between ranks -------------------------------------------------------------------


def _gathered(own: Tensor, group: dist.ProcessGroup | None) -> list[list[int]]:
    """Every rank's, in the group's order."""
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    rows: list[list[int]] = torch.stack(every).tolist()
    return rows


def _text(words: Sequence[int]) -> str:
    data = b"".join(word.to_bytes(8, "little", signed=True) for word in words)
    return data.rstrip(b"\0").decode(errors="replace")


def _check_sharding(found: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    ranks = set(dist.get_process_group_ranks(group or dist.group.WORLD))
    for name, tensor in found.items():
        if not isinstance(tensor, DTensor):
            continue
        mesh = tensor.device_mesh
        for dimension, placement in enumerate(tensor.placements):
            owners = ranks.intersection(dist.get_process_group_ranks(mesh.get_group(dimension)))
            if not placement.is_replicate() and len(owners) > 1:
                raise UsageError(
                    f"{name} is sharded over the ranks that are compared, so none of them has what another has: "
                    "give the group of replicas, which there is with DDP or HSDP"
                )


# --- words ---------------------------------------------------------------------------------------


def _most(count: int, odd: Iterable[Odd], one: Odd) -> int:
    """How many hold what `one` does not, at least."""
    return count - sum(bool(set(other.tensors) & set(one.tensors)) for other in odd)


def _named(names: Sequence[str]) -> str:
    return _listed([*names[:_FEW], *([f"{len(names) - _FEW} more"] if len(names) > _FEW else [])])


def _listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
