"""Tensors into an image and back: bit-equal, of every dtype, in any strides; sums are right."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.checkpoint.memory import copy_cpu
from elastic.checkpoint.state.image import CHUNK, SIZES, Image, Piece, lay_out
from elastic.proto import sums
from tests.proto.chunks import damaged

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(dtype: str, *shape: int) -> torch.Tensor:
    """Random bits, as a tensor of `dtype`; of bool, 0 and 1."""
    count = torch.Size(shape).numel() * SIZES[dtype]
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).view(shape)


def raw(tensor: torch.Tensor) -> bytes:
    """Its elements, one after the other."""
    words = tensor.view(WORDS[tensor.itemsize]) if tensor.itemsize in WORDS else tensor
    return words.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def piece_of(image: Image, name: str, out: bytearray) -> torch.Tensor:
    piece, start = image.pieces[name], image.starts[name]
    return copy_cpu.tensor_of(piece, memoryview(out)[start : start + piece.nbytes])


def laid_out(tensors: dict[str, torch.Tensor], values: bytes = b"") -> Image:
    pieces = [
        Piece(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offset=(0,) * tensor.dim(),
            extent=tuple(tensor.shape),
        )
        for name, tensor in tensors.items()
    ]
    return lay_out(pieces, {}, len(values))


def written(tensors: dict[str, torch.Tensor], values: bytes = b"") -> tuple[Image, bytearray]:
    image = laid_out(tensors, values)
    out = bytearray(image.nbytes)
    chunks = copy_cpu.write(image, tensors, values, memoryview(out))
    assert [chunk.end for chunk in chunks] == image.chunk_ends()
    assert damaged(memoryview(out), chunks) == []
    assert out[: len(image.header)] == image.header
    assert out[image.values_at : image.sums_at] == values
    assert len(chunks) * sums.ENTRY == image.sums_bytes
    return image, out


@pytest.mark.parametrize("dtype", sorted(SIZES))
def test_every_dtype_comes_back_bit_by_bit(dtype: str) -> None:
    tensors = {
        "a": bits(dtype, 3, 5),
        "zero": bits(dtype, 0, 4),
        "scalar": bits(dtype),
        "t": bits(dtype, 4, 6).t(),
    }
    image, out = written(tensors, b'{"n":1}')
    for name, tensor in tensors.items():
        back = piece_of(image, name, out)
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert raw(back) == raw(tensor)


@settings(max_examples=30)
@given(st.permutations([0, 1, 2]), st.integers(1, 3), st.booleans())
def test_any_strides(order: list[int], stride: int, conjugate: bool) -> None:
    tensor = bits("complex64", 4, 6, 5).permute(order)[::stride, :, 1:]
    tensor = tensor.conj() if conjugate else tensor
    image, out = written({"x": tensor})
    assert raw(piece_of(image, "x", out)) == raw(tensor.resolve_conj())


def test_a_large_tensor_has_a_checksum_every_chunk() -> None:
    tensors = {"small": bits("int8", 3), "large": bits("uint8", 2 * CHUNK + 5)}
    image, out = written(tensors)
    start = image.starts["large"]
    ends = [end for end in image.chunk_ends() if end > start]
    assert ends[:3] == [start + CHUNK, start + 2 * CHUNK, start + 2 * CHUNK + 5]
    assert raw(piece_of(image, "large", out)) == raw(tensors["large"])
