import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Model
from tokenizers.normalizers import NFKC, Lowercase, Normalizer

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.data import TokenizerFlags
from elastic.trainer.data import tokenizers
from elastic.trainer.data.tokenizers import NullTokenizer, TextTokenizer, Tokenizer, build, load

GOLDEN = Path(__file__).parent / "golden" / "gpt2"
VOCAB, MERGES = GOLDEN / "vocab.json", GOLDEN / "merges.txt"
TEXTS: list[tuple[str, list[int]]] = json.loads((GOLDEN / "texts.json").read_text())
ANY_TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]))


def gpt2(vocab: Path = VOCAB, merges: Path = MERGES) -> Tokenizer:
    return build(TokenizerFlags(vocab_file=vocab, merge_file=merges))


GPT2 = gpt2()


def test_ids_are_gpt2s() -> None:
    assert GPT2.encode([text for text, _ in TEXTS]) == [ids for _, ids in TEXTS]
    assert [GPT2.decode(ids) for _, ids in TEXTS] == [text for text, _ in TEXTS]
    assert (GPT2.vocab_size, GPT2.eod) == (50257, 50256)


def test_no_text_ends_its_own_document() -> None:
    assert GPT2.eod not in GPT2.encode(["a<|endoftext|>b"])[0]
    assert GPT2.decode([GPT2.eod]) == "<|endoftext|>"


@given(text=ANY_TEXT)
def test_any_text_comes_back_from_a_tokenizer_kept_beside_checkpoints(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "kept"
    if not folder.exists():
        GPT2.save(folder)
        assert {path.name for path in folder.iterdir()} == {
            tokenizers.MODEL_NAME,
            tokenizers.CONFIG_NAME,
        }
    kept = load(folder)
    assert kept.decode(GPT2.encode([text])[0]) == text
    assert kept.encode([text]) == GPT2.encode([text])
    assert (kept.vocab_size, kept.eod) == (GPT2.vocab_size, GPT2.eod)


def normalised(by: Normalizer) -> TextTokenizer:
    """GPT-2's that writes text so before it cuts it."""
    model = Model.from_str(GPT2.files[tokenizers.MODEL_NAME])
    model.normalizer = by
    return TextTokenizer(model=model, end=tokenizers.GPT2_END)


def test_a_digest_is_of_words_merges_cuts_and_end_and_not_of_files(tmp_path: Path) -> None:
    GPT2.save(tmp_path)
    assert load(tmp_path).digest == GPT2.digest
    lines = MERGES.read_text().splitlines()
    (tmp_path / "merges.txt").write_text("\n".join([*lines[:-2], lines[-1], lines[-2]]))
    swapped = gpt2(merges=tmp_path / "merges.txt")
    assert isinstance(GPT2, TextTokenizer)
    others = [
        GPT2,
        swapped,
        replace(GPT2, end=None),
        normalised(Lowercase()),
        normalised(NFKC()),
        NullTokenizer(words=300),
        NullTokenizer(words=350),
    ]
    assert len({one.digest for one in others}) == len(others)
    for one in others:
        assert tokenizers.another(tmp_path, one) == (one is not GPT2)
    assert not tokenizers.another(tmp_path / "none", GPT2)
    (tmp_path / tokenizers.MODEL_NAME).write_text("half")
    assert not tokenizers.another(tmp_path, GPT2)


def test_half_a_character_is_told_in_one_line() -> None:
    """JSON may have one: `"\\ud800"`."""
    with pytest.raises(UsageError, match=r"half a character, '\\ud800'"):
        GPT2.encode(["whole", "\ud800"])


def test_hugging_faces_files_are_read_with_what_ends_a_document(tmp_path: Path) -> None:
    GPT2.save(tmp_path)
    config = tmp_path / tokenizers.CONFIG_NAME
    file = tmp_path / tokenizers.MODEL_NAME
    for told in (None, '{"eos_token": "!"}', '{"eos_token": {"content": "!"}}'):
        config.unlink() if told is None else config.write_text(told)
        for path in (tmp_path, file):
            found = build(TokenizerFlags(tokenizer_model=path))
            assert found.eod == (50256 if told is None else 0)
            assert found.encode(["Hello"]) == GPT2.encode(["Hello"])
    config.write_text('{"eos_token": "</nothing>"}')
    with pytest.raises(UsageError, match="name it as eos_token"):
        _ = load(tmp_path).eod
    file.write_text("{}")
    with pytest.raises(UsageError, match=r"tokenizer\.json is no tokenizer of Hugging Face's"):
        load(tmp_path)
    file.unlink()
    with pytest.raises(UsageError, match=r"cannot read .*tokenizer\.json: No such file"):
        load(tmp_path)


def test_ids_as_text(tmp_path: Path) -> None:
    null = build(TokenizerFlags(tokenizer_type="NullTokenizer", vocab_size=100))
    assert (null.vocab_size, null.eod) == (101, 100)
    assert null.encode(["1 2 100", ""]) == [[1, 2, 100], []]
    assert null.decode([1, 2]) == "1 2"
    null.save(tmp_path)
    assert load(tmp_path) == NullTokenizer(words=100)
    with pytest.raises(UsageError, match="whole numbers"):
        null.encode(["one"])
    with pytest.raises(UsageError, match="id 101 is not below"):
        null.encode(["101"])


@pytest.mark.parametrize(
    "size", ["", '"vocab_size": "many"', '"vocab_size": -5', '"vocab_size": true']
)
def test_a_size_of_ids_as_text_that_is_none_is_told(tmp_path: Path, size: str) -> None:
    told = ", ".join(filter(None, ('"tokenizer_class": "NullTokenizer"', size)))
    (tmp_path / "tokenizer_config.json").write_text(f"{{{told}}}")
    with pytest.raises(UsageError, match=r"config\.json is of a NullTokenizer, and its vocab_size"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("vocab.json", "{", r"vocab\.json is no vocabulary, a JSON"),
        ("vocab.json", "[1]", r"vocab\.json is no vocabulary, a JSON"),
        ("vocab.json", '{"a": 1, "b": 1}', "two tokens one id"),
        ("vocab.json", '{"a": 0}', r"does not have '!': a GPT-2 vocabulary has all bytes"),
        ("merges.txt", "#version: 0.2\nq zz\n", "line 2 makes 'zz', which .* does not have"),
        ("merges.txt", "abc\n", "line 1: 'abc' is not two tokens"),
        ("merges.txt", "a" * 200, "line 1: '" + "a" * 79 + r"\.\.\. is not two tokens"),
        ("merges.txt", None, r"cannot read .*merges\.txt: No such file"),
    ],
)
def test_files_that_do_not_fit_are_named(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    for path in (VOCAB, MERGES):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).unlink()
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt")


def test_without_the_extra_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    GPT2.save(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match="tokenizers is not installed: pip install"):
        gpt2()
    with pytest.raises(UsageError, match="tokenizers is not installed: pip install"):
        load(tmp_path)


def test_flags_that_lack_a_file_are_refused() -> None:
    with pytest.raises(UsageError, match="no tokenizer: give --vocab-file"):
        build(TokenizerFlags())
    assert not TokenizerFlags().given
    with pytest.raises(UsageError, match="GPT2BPETokenizer needs --merge-file"):
        TokenizerFlags(vocab_file=VOCAB)
    with pytest.raises(UsageError, match="BertWordPieceCase: there is GPT2BPETokenizer, "):
        TokenizerFlags(tokenizer_type="BertWordPieceCase")
    with pytest.raises(UsageError, match="divisible-by is at least 1"):
        TokenizerFlags(vocab_size=1, make_vocab_size_divisible_by=0)
    with pytest.raises(UsageError, match="--vocab-size is at least 1"):
        TokenizerFlags(vocab_size=0)


def test_the_vocabulary_is_padded_and_said_as_by_megatron() -> None:
    assert tokenizers.padded(50257, 128) == 50304
    assert tokenizers.padded(50304, 128) == 50304
    assert (
        tokenizers.padding_line(50257, 128)
        == " > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)"
    )


def test_what_is_kept_already_is_not_written_again(tmp_path: Path) -> None:
    """A disk that is full by then would end the restart."""
    GPT2.save(tmp_path)
    before = {file.name: file.stat().st_ino for file in tmp_path.iterdir()}
    GPT2.save(tmp_path)
    assert {file.name: file.stat().st_ino for file in tmp_path.iterdir()} == before
