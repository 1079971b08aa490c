"""The datasets of a run, and which of them gives which sample.

Joins what the modules beside it do, as Megatron's `BlendedMegatronDatasetBuilder` does: each source's
sequences are shared out (`splits`), cut to samples and shuffled (`samples`), several sources are blended
(`blend`), and all indices lie on the disk (`index_cache`): the first process that asks makes them, the
others wait for it and map them.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.data import DEFAULT_SPLIT, WAYS, DataFlags
from elastic.trainer.data import blend, index_cache, mock, remote, splits
from elastic.trainer.data.indexed import Indexed, paths, shared
from elastic.trainer.data.items import Form, Item, Vocabulary
from elastic.trainer.data.mock import MockDataset
from elastic.trainer.data.samples import Request, Samples, plan
from elastic.trainer.data.splits import Splits

LOOKS = 64
"""Places of a .bin that a digest is of, and of how many bytes each."""
LOOK_BYTES = 4096


def asked(
    train_samples: int,
    *,
    train_iters: int,
    eval_interval: int,
    eval_iters: int,
    global_batch_size: int,
    full_validation: bool = False,
) -> Splits[int | None]:
    """How many samples a run asks of each split, by Megatron's count; None: each once.

    train_samples: those of the whole run, by its schedule of batch sizes. global_batch_size: at its end.
    """
    evaluations = train_iters // eval_interval + 1 if eval_interval else 0
    return Splits(
        train=train_samples,
        valid=None if full_validation else evaluations * eval_iters * global_batch_size,
        test=eval_iters * global_batch_size,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One indexed dataset's part in a split."""

    name: str
    """What --data-path calls it: a prefix, or the URL of one."""
    prefix: str
    """Of its .bin and .idx, on this node."""
    cache: Path
    """Folder of its indices."""
    split: str
    """Name of the split."""
    request: Request
    """Which samples are made of it."""

    def open(self) -> Samples:
        """Its samples; their indices are made if they are not there. UsageError where that cannot be."""
        data = shared(self.prefix)
        indices = index_cache.cached(self.cache, self.split, data.lengths, self.request)
        return Samples(data, indices, self.request.seq_length)


@dataclass(frozen=True, kw_only=True)
class GPTDataset:
    """A split of one source, or of several that are blended. Sent to another process it takes its files'
    names along, and opens them there."""

    name: str
    """Of its split, or of a validation set."""
    sources: tuple[Source, ...]
    weights: tuple[float, ...] | None
    """Of several sources, where there are any."""
    samples: int | None
    """How many are asked for of what is blended; None: all, each once, and one source is not blended."""
    form: Form
    digest: str
    """What two runs with the same samples in the same order agree on: a function of the data, the split,
    the epochs, the samples' length and form and the seed, not of where files lie, nor of how many samples of
    an epoch are asked for."""

    @cached_property
    def _opened(self) -> tuple[Samples, ...]:
        return tuple(source.open() for source in self.sources)

    @cached_property
    def _blend(self) -> blend.Blend | None:
        if self.samples is None and len(self.sources) == 1:
            return None
        sizes = [len(one) for one in self._opened]
        first = self.sources[0]
        return index_cache.blended(first.cache, first.split, sizes, self.weights, self.samples)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __len__(self) -> int:
        """Samples; those asked for, and maybe more."""
        return len(self._opened[0]) if self._blend is None else len(self._blend.datasets)

    def __getitem__(self, number: int) -> Item:
        """UsageError where the data are not what their index says, or of another vocabulary."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        source = 0
        if self._blend is not None:
            source, number = int(self._blend.datasets[number]), int(self._blend.samples[number])
        return self.form.item(self._opened[source][number], source, self.sources[source].prefix)


AnyDataset = GPTDataset | MockDataset


def datasets(
    flags: DataFlags, vocabulary: Vocabulary, samples: Splits[int | None]
) -> tuple[AnyDataset | None, AnyDataset | list[AnyDataset] | None, AnyDataset | None]:
    """Train, validation and test; None for what no sample is asked of, or that has no data. samples: how many
    are asked for; None: those of one epoch, blended without weights.

    Several validation sets are a list of datasets with names. All ranks call it; every file is made by one
    of them. UsageError where the data do not give what is asked of them.
    """
    if not (flags.data_path or flags.per_split or flags.mock_data):
        raise UsageError(WAYS)
    form = _form(flags, vocabulary)
    found: list[Any] = []
    for name in splits.NAMES:
        count = getattr(samples, name)
        given = _given(flags, name)
        if count == 0 or not (given or flags.mock_data):
            found.append(None)
        elif flags.mock_data:
            found.append(
                MockDataset(
                    name=name,
                    samples=mock.WHOLE if count is None else count,
                    seq_length=flags.seq_length,
                    seed=flags.seed,
                    form=form,
                )
            )
        elif name == "valid" and flags.multiple_validation_sets:
            found.append(_sets(flags, form, count))
        else:
            found.append(_dataset(flags, form, name, given, count))
    train, valid, test = found
    return train, valid, test


def _given(flags: DataFlags, split: str) -> tuple[str, ...]:
    """What --data-path, or its own, says of a split; nothing where --split has no share for it."""
    if flags.per_split:
        return tuple(getattr(flags, f"{split}_data_path"))
    shares = splits.fractions(flags.split or DEFAULT_SPLIT)
    return flags.data_path if split == "train" or shares[splits.NAMES.index(split)] else ()


def _form(flags: DataFlags, vocabulary: Vocabulary) -> Form:
    needs_eod = flags.eod_mask_loss or flags.reset_position_ids
    return Form(
        vocab_size=vocabulary.vocab_size,
        eod=vocabulary.eod if needs_eod or flags.mock_data else None,
        eod_mask_loss=flags.eod_mask_loss,
        reset_position_ids=flags.reset_position_ids,
    )


def _sets(flags: DataFlags, form: Form, count: int | None) -> list[GPTDataset]:
    """Validation sets, each of all samples that are asked of validation."""
    prefixes, weights = blend.parse(flags.valid_data_path, _is_there)
    if weights is not None:
        raise UsageError(
            "--multiple-validation-sets are not blended: give --valid-data-path without weights"
        )
    names = flags.validation_set_names or tuple(map(str, range(len(prefixes))))
    if len(names) != len(prefixes) or len(set(names)) != len(names):
        raise UsageError(
            f"--validation-set-names gives {len(set(names))} names to {len(prefixes)} validation sets: "
            "give each one of its own"
        )
    return [
        _dataset(flags, form, "valid", [prefix], count, name)
        for name, prefix in zip(names, prefixes, strict=True)
    ]


def _dataset(
    flags: DataFlags,
    form: Form,
    split: str,
    given: Sequence[str],
    count: int | None,
    name: str = "",
) -> GPTDataset:
    """`count` samples of a split of what a --data-path gives; None: all, each once."""
    names, weights = blend.parse(given, _is_there)
    prefixes = [
        remote.local(one, flags.object_storage_cache_path, flags.data_storage_options)
        for one in names
    ]
    if count is None or (flags.per_split and len(prefixes) == 1):
        weights = None  # as Megatron has it, which shows where the samples' indices are looked for
    each: list[int | None]
    if weights is not None and count is not None:
        each = [blend.with_surplus(share) for share in blend.shares(weights, count)]
    else:
        each = [count] if len(prefixes) == 1 else [None] * len(prefixes)
    blended = weights is not None or len(prefixes) > 1
    opened = [shared(prefix) for prefix in prefixes]
    found = [_ranges(flags, split, one, count) for one in opened]
    sources = tuple(
        Source(
            name=called,
            prefix=prefix,
            cache=flags.data_cache_path
            or Path(prefix).absolute().parent / "cache" / "GPTDataset_indices",
            split=split,
            request=Request(
                sequences=own, samples=wanted, seq_length=flags.seq_length, seed=flags.seed
            ),
        )
        for called, prefix, own, wanted in zip(names, prefixes, found, each, strict=True)
    )
    made = GPTDataset(
        name=name or split,
        sources=sources,
        weights=None if weights is None else tuple(weights),
        samples=count if blended else None,
        form=form,
        digest=_digest(sources, opened, weights, form),
    )
    if len(made) < (count or 0):
        raise UsageError(
            f"{' '.join(prefixes)} have {len(made)} samples for {split} in one epoch, and {count} are "
            "asked for: give each a weight before it, and epochs are repeated"
        )
    return made


def _is_there(prefix: str) -> bool:
    return any(path.exists() for path in paths(prefix))


def _ranges(flags: DataFlags, split: str, data: Indexed, count: int | None) -> range:
    """The sequences of a source that are the split's. UsageError where --split leaves none."""
    if flags.per_split:
        return range(len(data))
    text = flags.split or DEFAULT_SPLIT
    found = splits.ranges(text, len(data))
    own: range = getattr(found, split)
    try:
        asked_of = 1 if count is None else count
        wanted = Splits(**{name: asked_of if name == split else 0 for name in splits.NAMES})
        splits.check_asked(found, wanted, text)
    except UsageError as error:
        raise UsageError(f"{data.prefix}: {error}") from error
    return own


def _digest(
    sources: Sequence[Source],
    opened: Sequence[Indexed],
    weights: Sequence[float] | None,
    form: Form,
) -> str:
    """A blend chooses one sample after the other, so how many are asked for decides no order but the epochs'."""
    told = [
        {
            "data": _identity(data),
            "split": source.split,
            **{name: str(value) for name, value in asdict(source.request).items()},
            "samples": _epochs(source.request, data),
        }
        for source, data in zip(sources, opened, strict=True)
    ]
    text = json.dumps({"sources": told, "weights": weights, "form": form.told})
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _epochs(request: Request, data: Indexed) -> str:
    """What the number of samples decides of their order: so a run may be made longer within an epoch."""
    own = request.sequences
    tokens = int(data.lengths[own.start : own.stop].sum(dtype=np.int64))
    try:
        course = plan(request, tokens)
    except UsageError as error:
        raise UsageError(f"{data.prefix}: {error}") from error
    return f"{course.epochs} epochs, the last {'apart' if course.separate else 'among them'}"


def _identity(data: Indexed) -> str:
    """Of an indexed dataset, wherever it lies: its index, and what lies at `LOOKS` places of the .bin."""
    found = xxhash.xxh3_128(data.dtype.str.encode())
    found.update(data.lengths.view(np.uint8).data)
    with paths(data.prefix)[0].open("rb") as file:
        size = file.seek(0, 2)
        for place in np.linspace(0, max(0, size - LOOK_BYTES), LOOKS).astype(np.int64).tolist():
            file.seek(place)
            found.update(file.read(LOOK_BYTES))
    return found.hexdigest()
