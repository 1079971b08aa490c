"""Typed JSON: what comes back is what went in, type by type; what cannot is refused by its path."""

import collections
import json
import struct
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint.state.typed_json import DEPTH, decode, encode
from elastic.proto.errors import CheckpointError


def same(a: Any, b: Any) -> bool:
    """Equal, and of equal types all the way down; NaN equals NaN; order counts."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        if isinstance(a, collections.defaultdict) and a.default_factory is not b.default_factory:
            return False
        return len(a) == len(b) and all(
            same(x, y) for x, y in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, collections.deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return bool(a == b)


keys = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(),
    st.binary(),
    st.tuples(st.integers(), st.text()),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.text(alphabet=st.characters(categories=["Cs", "Lu"])),
    st.binary(),
    st.binary().map(bytearray),
    st.complex_numbers(allow_nan=False),
    st.sets(st.integers()),
    st.frozensets(st.text()),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3)),
    st.floats(width=32).map(np.float32),
    st.lists(st.integers(-(2**31), 2**31 - 1)).map(lambda v: np.array(v, dtype=np.int64)),
    st.sampled_from(
        [torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3]), np.zeros((0, 3))]
    ),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.dictionaries(st.sampled_from(["$dict", "$", "a"]), inner),
        st.dictionaries(keys, inner).map(collections.OrderedDict),
        st.dictionaries(keys, inner).map(lambda d: collections.defaultdict(list, d)),
        st.lists(inner, max_size=3).map(lambda v: collections.deque(v, maxlen=3)),
        st.dictionaries(keys, st.integers()).map(collections.Counter),
    ),
    max_leaves=20,
)


@given(values)
def test_what_goes_in_comes_out(value: Any) -> None:
    text = encode(value)
    assert same(decode(text), value)
    assert encode(decode(text)) == text


def test_it_is_plain_json_where_that_will_do() -> None:
    value = {"epoch": 3, "lr": [0.1, 1e-9], "name": "x", "done": False, "best": None}
    assert json.loads(encode(value)) == value


def test_what_torch_and_numpy_keep_in_their_states() -> None:
    """Schedulers, generators of random numbers, optimizers' groups."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3, 5])
    for state in (
        schedule.state_dict(),
        optimizer.state_dict()["param_groups"],
        np.random.PCG64(7).state,
        np.random.MT19937(7).state,
        __import__("random").getstate(),
    ):
        assert same(decode(encode(state)), state)


@dataclass
class Custom:
    number: int = 0


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [Custom(), object(), Pair(1, 2), PurePath("/"), len, Custom, torch.zeros(1), {1}.__iter__],
)
def test_what_cannot_be_kept_is_refused_by_its_path(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"^state\.a\[1\]\[\(2, 3\)\] is a .* cannot keep"):
        encode({"a": [0, {(2, 3): value}]}, "state")


def test_more_that_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^counts is a defaultdict of .*make it a dict"):
        encode(collections.defaultdict(Custom), "counts")
    with pytest.raises(CheckpointError, match=r"^names is a numpy array of object"):
        encode(np.array([None]), "names")
    nest: list[Any] = []
    nest.append(nest)
    with pytest.raises(CheckpointError, match=f"more than {DEPTH} levels"):
        encode(nest, "nest")


@pytest.mark.parametrize(
    "text",
    [
        "", "nonsense", '{"$os.system":["id"]}', '{"$tuple":1}', '{"$int":5}', '{"$numpy":["O",[1],"AAAA"]}',
        '{"$numpy":["<i8",[1000000000],"AAAA"]}', '{"$dict":[[{"$list":1},2]]}', '{"$dict":[[[1],2]]}',
        '{"$defaultdict":["os.system",[]]}', '{"$dtype":"load"}', '{"$tensor":"w"}', '{"$tuple":[],"a":1}',
        '{"$bytes":"*"}', '{"$float":"00"}', "[" * 100_000, '{"$set":[[1]]}', '{"$device":"moon"}',
    ],
)  # fmt: skip
def test_hostile_texts_are_refused(text: str) -> None:
    with pytest.raises(CheckpointError):
        decode(text)


def test_tensors_are_kept_elsewhere() -> None:
    kept: dict[str, torch.Tensor] = {}

    def store(tensor: torch.Tensor, path: str) -> str:
        kept[path] = tensor
        return path

    value: Any = {"a": {"b": [torch.ones(2)]}, "c": {3: torch.zeros(1)}}
    text = encode(value, "", store)
    assert list(kept) == ["a.b[0]", "c[3]"]
    back = decode(text, kept.__getitem__)
    assert back["a"]["b"][0] is value["a"]["b"][0]
    assert back["c"][3] is value["c"][3]
