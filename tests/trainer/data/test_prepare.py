import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.data import TokenizerFlags
from elastic.trainer.data import corpus, prepare, splits, tokenizers
from elastic.trainer.data.indexed import Indexed
from elastic.trainer.data.tokenizers import TextTokenizer, Tokenizer

ROOT = Path(__file__).parents[3]
SMALL = {"vocab_size": 300, "max_bytes": 60_000}
FILES = [".lock", "merges.txt", "prepared.json", f"{prepare.PREFIX}.bin", f"{prepare.PREFIX}.idx"]


@pytest.fixture(scope="module")
def words() -> TextTokenizer:
    return prepare.learn(corpus.documents(60_000), 400)


def kept(directory: Path) -> Tokenizer:
    return tokenizers.build(
        TokenizerFlags(vocab_file=directory / "vocab.json", merge_file=directory / "merges.txt")
    )


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(words: TextTokenizer, text: str) -> None:
    assert words.decode(words.encode([text])[0]) == text


def test_source_takes_fewer_tokens_than_bytes(words: TextTokenizer) -> None:
    text = "def sum(self, values):\n    return self.total\n"
    assert len(words.encode([text])[0]) < 0.8 * len(text)
    assert (words.vocab_size, words.eod) == (400, 0)


def test_the_corpus_is_bounded_ordered_and_code_only(tmp_path: Path) -> None:
    for name in ["b.py", "a/z.py", "a/test/t.py", "site-packages/s.py", "notes.txt", "empty.py"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.py" else f"# {name}\n")
    (tmp_path / "a" / "latin.py").write_bytes(b"# \xe9\n")
    assert list(corpus.documents(1000, tmp_path)) == ["# a/z.py\n", "# b.py\n"]
    assert list(corpus.documents(12, tmp_path)) == ["# a/z.py\n"]
    assert list(corpus.documents(1, tmp_path)) == ["# a/z.py\n"]


def test_each_split_has_some_of_it() -> None:
    """Else the tutorial's run ends at its first step: as it would with Megatron's own shares."""
    documents = sum(1 for _ in corpus.documents(prepare.BYTES))
    found = splits.ranges(prepare.SPLIT, documents)
    assert all((found.train, found.valid, found.test))
    assert f"--split {prepare.SPLIT}" in (ROOT / "docs" / "tutorial.md").read_text()


def test_a_python_without_source_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no Python source"):
        corpus.stdlib_files(tmp_path)


def test_many_processes_prepare_one_folder_and_another_is_the_same(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [sys.executable, "-m", "elastic.trainer.data.prepare", f"--output-dir={data}"]
    command += ["--vocab-size=300", "--corpus-bytes=60000"]
    started = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    assert [process.wait(timeout=150) for process in started] == [0, 0]
    assert sorted(path.name for path in data.iterdir()) == sorted([*FILES, "vocab.json"])
    # Nodes that share no disk train on the same tokens.
    prepare.prepare(tmp_path / "again", **SMALL)
    for path in data.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_what_is_prepared_decodes_to_the_corpus(tmp_path: Path) -> None:
    prepare.prepare(tmp_path, **SMALL)
    words, data = kept(tmp_path), Indexed(tmp_path / prepare.PREFIX)
    documents = [data.tokens(number).tolist() for number in range(len(data))]
    assert all(one[-1] == words.eod for one in documents)
    assert [words.decode(one[:-1]) for one in documents] == list(corpus.documents(60_000))


def test_an_unfinished_folder_is_made_anew(tmp_path: Path) -> None:
    prepare.prepare(tmp_path, **SMALL)
    whole = (tmp_path / f"{prepare.PREFIX}.bin").read_bytes()
    (tmp_path / prepare.SUMMARY_NAME).unlink()
    (tmp_path / f"{prepare.PREFIX}.bin").write_bytes(b"torn")
    prepare.prepare(tmp_path, **SMALL)
    assert (tmp_path / f"{prepare.PREFIX}.bin").read_bytes() == whole


def test_another_request_for_the_same_folder_is_refused(tmp_path: Path) -> None:
    prepare.prepare(tmp_path, **SMALL)
    with pytest.raises(UsageError, match="another --output-dir"):
        prepare.prepare(tmp_path, vocab_size=301, max_bytes=60_000)


def test_no_room_for_the_bytes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare.main([f"--output-dir={tmp_path}", "--vocab-size=256"]) == 2
    assert capsys.readouterr().err == "--vocab-size is at least 257, not 256\n"
