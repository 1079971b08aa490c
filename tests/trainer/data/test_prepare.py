import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from elastic.proto.errors import UsageError
from elastic.trainer.data import corpus, tokenizer
from elastic.trainer.data.batches import TokenFile
from elastic.trainer.data.prepare import SUMMARY_NAME, prepare

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return tokenizer.train(corpus.documents(60_000), 400)


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(words: Tokenizer, text: str) -> None:
    assert words.decode(words.encode(text).ids) == text


def test_source_takes_fewer_tokens_than_bytes(words: Tokenizer) -> None:
    text = "def sum(self, values):\n    return self.total\n"
    assert len(words.encode(text).ids) < 0.8 * len(text)
    assert words.get_vocab_size() == 400
    assert tokenizer.end_of_document_id(words) == 0


def test_a_saved_tokenizer_is_the_same(words: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(words, tmp_path)
    assert tokenizer.load(tmp_path).to_str() == words.to_str()
    assert [path.name for path in tmp_path.iterdir()] == [tokenizer.FILE_NAME]


def test_no_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 257"):
        tokenizer.train([], 256)


def test_the_corpus_is_bounded_ordered_and_code_only(tmp_path: Path) -> None:
    for name in ["b.py", "a/z.py", "a/test/t.py", "site-packages/s.py", "notes.txt", "empty.py"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.py" else f"# {name}\n")
    (tmp_path / "a" / "latin.py").write_bytes(b"# \xe9\n")
    assert list(corpus.documents(1000, tmp_path)) == ["# a/z.py\n", "# b.py\n"]
    assert list(corpus.documents(12, tmp_path)) == ["# a/z.py\n"]
    assert list(corpus.documents(1, tmp_path)) == ["# a/z.py\n"]


def test_a_python_without_source_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no Python source"):
        corpus.stdlib_files(tmp_path)


def _prepare(directory: Path) -> TokenFile:
    return prepare(directory, vocab_size=300, max_bytes=60_000)


def test_of_many_processes_one_prepares(tmp_path: Path) -> None:
    data = tmp_path / "data"
    program = (
        "import pathlib, sys; from elastic.trainer.data.prepare import prepare; "
        "print(prepare(pathlib.Path(sys.argv[1]), vocab_size=300, max_bytes=60_000).digest)"
    )
    command = [sys.executable, "-c", program, str(data)]
    started = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    digests = {process.communicate(timeout=150)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0]
    names = sorted(path.name for path in data.iterdir())
    assert names == [".lock", "corpus.json", "corpus.tokens", "tokenizer.json"]
    # Made again elsewhere, it is the same: nodes that share no disk train on the same tokens.
    assert digests == {_prepare(tmp_path / "again").digest + "\n"}


def test_what_is_prepared_decodes_to_the_corpus(tmp_path: Path) -> None:
    tokens = _prepare(tmp_path).tokens()
    text = tokenizer.load(tmp_path).decode(tokens.tolist(), skip_special_tokens=True)
    assert text == "".join(corpus.documents(60_000))


def test_an_unfinished_directory_is_made_anew(tmp_path: Path) -> None:
    whole = _prepare(tmp_path)
    (tmp_path / SUMMARY_NAME).unlink()
    whole.path.write_bytes(b"torn")
    assert _prepare(tmp_path) == whole
    assert (
        whole.path.stat().st_size == 2 * json.loads((tmp_path / SUMMARY_NAME).read_text())["tokens"]
    )


def test_another_request_for_the_same_directory_is_refused(tmp_path: Path) -> None:
    _prepare(tmp_path)
    with pytest.raises(UsageError, match="another --data-dir"):
        prepare(tmp_path, vocab_size=301, max_bytes=60_000)


@pytest.mark.parametrize("vocab_size", [256, 65537])
def test_an_impossible_vocabulary_is_refused(tmp_path: Path, vocab_size: int) -> None:
    with pytest.raises(UsageError, match="257 to 65536"):
        prepare(tmp_path, vocab_size=vocab_size, max_bytes=60_000)
