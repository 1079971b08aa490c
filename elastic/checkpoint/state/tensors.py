"""The tensors of a state: which piece of which logical tensor each is, and who holds the same. What a
checkpoint cannot keep is refused, by its path."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from elastic.checkpoint.state.image import MOST_DIMS, SIZES, Piece
from elastic.proto.errors import CheckpointError


class Part(NamedTuple):
    """This rank's piece of one tensor of the state."""

    piece: Piece
    tensor: torch.Tensor
    """The piece itself, as the script has it, on its device; of any strides."""
    holders: tuple[int, ...]
    """The ranks that hold the same piece, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What a tensor is to a checkpoint, and all that this follows from."""

    piece: Piece
    holders: tuple[int, ...]
    kind: type
    dtype: torch.dtype
    mesh: Any = None
    """Of a DTensor, as are its placements; `kind` and `dtype` are those of the piece then."""
    placements: Any = None

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether it is what a plain tensor is; its holders are another question."""
        return (
            type(tensor) is self.kind
            and self.mesh is None
            and tensor.dtype is self.dtype
            and tensor.layout is torch.strided
            and not tensor.is_meta
            and tensor.shape == self.piece.shape
        )

    def fits_sharded(self, tensor: DTensor, local: torch.Tensor) -> bool:
        return (
            type(local) is self.kind
            and tensor.device_mesh is self.mesh
            and (tensor.placements is self.placements or _equal(tensor.placements, self.placements))
            and local.dtype is self.dtype
            and local.layout is torch.strided
            and not local.is_meta
            and tensor.shape == self.piece.shape
            and local.shape == self.piece.extent
        )


def _equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Placements; a strided shard says that it is equal to one that is not."""
    return some == others and [*map(type, some)] == [*map(type, others)]


@dataclass(slots=True)
class Tensors:
    """Gathers the tensors that the encoder meets."""

    rank: int
    """Ours."""
    replicas: Mapping[int, tuple[int, ...]]
    known: dict[str, Known]
    parts: dict[str, Part] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    _seen: dict[int, list[str]] = field(default_factory=dict)
    """The tensors that begin at an address."""

    def __call__(self, tensor: torch.Tensor, path: str) -> str:
        if path in self.parts or path in self.ties:
            raise CheckpointError(f"{path!r} is the name of two tensors in the state")
        part = (
            self._sharded(tensor, path) if isinstance(tensor, DTensor) else self._part(tensor, path)
        )
        if 0 not in part.piece.extent:
            beside = self._seen.setdefault(part.tensor.data_ptr(), [])
            for other in beside:
                if _memory(self.parts[other].tensor) == _memory(part.tensor):
                    self.ties[path] = other
                    return path
            beside.append(path)
        self.parts[path] = part
        return path

    def _part(self, tensor: torch.Tensor, path: str) -> Part:
        holders = self.replicas.get(id(tensor)) or (self.rank,)
        known = self.known.get(path)
        if known is None or known.holders != holders or not known.fits(tensor):
            known = self.known[path] = _plain(tensor, path, holders)
        return Part(piece=known.piece, tensor=tensor.detach(), holders=holders)

    def _sharded(self, tensor: DTensor, path: str) -> Part:
        local = tensor.to_local()
        known = self.known.get(path)
        if known is None or not known.fits_sharded(tensor, local):
            known = self.known[path] = _sharded(tensor, local, path)
        return Part(piece=known.piece, tensor=local.detach(), holders=known.holders)


def _plain(tensor: torch.Tensor, path: str, holders: tuple[int, ...]) -> Known:
    _check(tensor, path)
    shape = tuple(tensor.shape)
    piece = Piece(
        name=path, dtype=_dtype(tensor), shape=shape, offset=(0,) * len(shape), extent=shape
    )
    return Known(piece, holders, type(tensor), tensor.dtype)


def _sharded(tensor: DTensor, local: torch.Tensor, path: str) -> Known:
    _check(local, path)
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"{path} is a DTensor with a partial sum, which a checkpoint cannot keep"
        )
    extent, offset, holders = _box(
        tensor.shape, tensor.device_mesh, tensor.placements, dist.get_rank()
    )
    if extent != tuple(local.shape):
        raise CheckpointError(
            f"{path} is a DTensor whose piece is no box ({list(tensor.placements)}), which a "
            "checkpoint cannot keep"
        )
    piece = Piece(
        name=path, dtype=_dtype(local), shape=tuple(tensor.shape), offset=offset, extent=extent
    )
    return Known(piece, holders, type(local), local.dtype, tensor.device_mesh, tensor.placements)


@functools.lru_cache(maxsize=4096)  # 0.1 ms each, and a model has few different ones
def _box(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...], rank: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Extent and offset of this rank's piece; and the ranks with the same one: those that differ from
    us only where it is replicated. rank: ours, by which `mesh` knows its place."""
    extent, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    place = mesh.get_coordinate()
    if place is None:
        return tuple(extent), tuple(offset), ()
    strided = {p.dim for p in placements if isinstance(p, _StridedShard)}
    if not all(_consecutive(shape[dim], dim, mesh, placements, place) for dim in strided):
        return (), (), ()
    index = tuple(
        slice(None) if placement.is_replicate() else coordinate
        for placement, coordinate in zip(placements, place, strict=True)
    )
    holders = tuple(sorted(mesh.mesh[index].flatten().tolist()))
    return tuple(extent), tuple(offset), holders


def _consecutive(
    size: int, dim: int, mesh: DeviceMesh, placements: tuple[Placement, ...], place: Sequence[int]
) -> bool:
    """Whether a piece has rows of a dim that follow one another, as it has where what is strided over one
    dim of the mesh is split over another, too."""
    rows = torch.arange(size)
    for across, placement in enumerate(placements):
        if getattr(placement, "dim", None) != dim:
            continue
        along = (
            _StridedShard(0, split_factor=placement.split_factor)
            if isinstance(placement, _StridedShard)
            else Shard(0)
        )
        pieces, _ = along._split_tensor(
            rows, mesh.size(across), with_padding=False, contiguous=True
        )
        rows = pieces[place[across]]
    return bool((rows.diff() == 1).all())


def _check(tensor: torch.Tensor, path: str) -> None:
    reason = ""
    if tensor.layout != torch.strided:
        reason = f"is a tensor of layout {tensor.layout}"
    elif tensor.is_quantized:
        reason = "is a quantized tensor"
    elif tensor.is_meta:
        reason = "is on the meta device: it has no values yet"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        reason = f"is a {type(tensor).__module__}.{type(tensor).__qualname__}"
    elif _dtype(tensor) not in SIZES:
        reason = f"is a tensor of {tensor.dtype}"
    elif tensor.dim() > MOST_DIMS:
        reason = f"has {tensor.dim()} dims"
    if reason:
        raise CheckpointError(f"{path} {reason}, which a checkpoint cannot keep")


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _memory(t: torch.Tensor) -> tuple[Any, ...]:
    """What tells that two tensors that begin at one address are one."""
    return t.device, t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()
