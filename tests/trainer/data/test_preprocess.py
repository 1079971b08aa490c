"""From loose JSON to indexed files: `elasticctl data`, and what it runs."""

import bz2
import contextlib
import errno
import gzip
import itertools
import json
import os
import pty
import resource
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic import ctl
from elastic.proto.errors import UsageError
from elastic.proto.verbs import GROUP
from elastic.trainer.arguments.data import TokenizerFlags
from elastic.trainer.data import commands, lines, words
from elastic.trainer.data.encoding import Settings
from elastic.trainer.data.indexed import Indexed
from elastic.trainer.data.preprocess import Done, preprocess
from elastic.trainer.data.tokenizers import TextTokenizer, build
from tests.elastic.asking import Answer, Ask
from tests.full_disk import files_of_at_most
from tests.waiting import wait_for

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "golden" / "gpt2"
FILES = TokenizerFlags(vocab_file=GOLDEN / "vocab.json", merge_file=GOLDEN / "merges.txt")
SETTINGS = Settings(tokenizer=FILES, keys=("text",), append_eod=True)
_BUILT = build(FILES)
assert isinstance(_BUILT, TextTokenizer)
GPT2: TextTokenizer = _BUILT
TEXTS: list[str] = [text for text, _ in json.loads((GOLDEN / "texts.json").read_text())]
FLAGS = [f"--vocab-file={FILES.vocab_file}", f"--merge-file={FILES.merge_file}"]


@pytest.fixture
def ask(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """`elasticctl` in this process, with the verbs that pyproject.toml names."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    points = [EntryPoint(name, value, GROUP) for name, value in told.items()]
    monkeypatch.setattr(ctl, "entry_points", lambda group: points)

    def run(*args: str | Path) -> Answer:
        capfd.readouterr()
        try:
            code = ctl.main(list(map(str, args)))
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Answer(code, *capfd.readouterr())

    return run


def lines_of(texts: list[str], **more: Any) -> bytes:
    return b"".join(json.dumps({"text": text} | more).encode() + b"\n" for text in texts)


def documents(prefix: str | Path) -> list[list[int]]:
    """Ids of every document."""
    found = Indexed(prefix)
    pairs = zip(found.documents[:-1].tolist(), found.documents[1:].tolist(), strict=True)
    return [[int(t) for k in range(a, b) for t in found.tokens(k)] for a, b in pairs]


def expected(texts: list[str]) -> list[list[int]]:
    return [[*ids, 50256] if ids else [] for ids in GPT2.encode(texts)]


# --- words ---------------------------------------------------------------------------------------

EASY = st.characters(max_codepoint=words.KNOWN - 1)
ODD = st.characters(exclude_categories=["Cs"])
OFTEN = st.sampled_from(" \n\t'sremvldtABé1²½_-\x1c\x85\xa0日л\u0301" + words.PUNCTUATION)
SPACES = st.sampled_from(" \n日\u2003\u3000\u180e\u200b\x1c\x85\xa0")
TABLE = words.Words(GPT2, np.dtype("<u2"))


@given(texts=st.lists(st.text(OFTEN | EASY) | st.text(OFTEN | ODD) | st.text(SPACES), max_size=3))
def test_words_are_encoded_as_by_the_library(texts: list[str]) -> None:
    found = [np.frombuffer(one, "<u2").tolist() for one in TABLE.encode(texts)]
    assert found == GPT2.encode(texts)


def test_a_table_that_is_full_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MOST", 3)
    small = words.Words(GPT2, np.dtype("<u2"))
    text = "the quick brown fox jumps over the lazy dog"
    assert np.frombuffer(small.encode([text])[0], "<u2").tolist() == GPT2.encode([text])[0]
    assert len(small) <= 3


# --- files ---------------------------------------------------------------------------------------


def tree(folder: Path, count: int = 6) -> list[str]:
    """A tree as WikiExtractor leaves it, some of it compressed; its texts in order."""
    texts = [f"{TEXTS[k % len(TEXTS)]} number {k}" for k in range(count * 50)]
    for number in range(count):
        path = folder / f"A{'AB'[number >= count / 2]}" / f"wiki_{number:02d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = lines_of(texts[number * 50 : number * 50 + 50], id=number)
        path.write_bytes([raw, gzip.compress(raw), bz2.compress(raw)][number % 3])
    (folder / ".DS_Store").write_bytes(b"\0")
    return texts


def test_a_tree_becomes_the_same_files_whoever_encodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BLOCK", 1000)
    texts = tree(tmp_path / "wiki")
    inputs = lines.files([str(tmp_path / "wiki")])
    assert [path.name for path in inputs] == [f"wiki_{n:02d}" for n in range(6)]
    heard: list[Done] = []
    for workers in (1, 3):
        preprocess(inputs, f"{tmp_path}/{workers}", SETTINGS, workers=workers, told=heard.append)
    assert documents(tmp_path / "1_text_document") == expected(texts)
    for kind in ("bin", "idx"):
        one, three = ((tmp_path / f"{n}_text_document.{kind}").read_bytes() for n in (1, 3))
        assert one == three
    assert len(heard) > 40
    assert heard[-1].documents == 300
    assert heard[-1].read == lines.size(inputs)
    assert {path.name.split(".")[-1] for path in tmp_path.iterdir()} == {"wiki", "bin", "idx"}


@given(
    texts=st.lists(st.sampled_from(["", "a", "b\n", "x" * 30]), max_size=20),
    length=st.integers(1, 99),
)
def test_blocks_are_whole_lines(
    texts: list[str], length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines"
    raw = lines_of(texts).rstrip(b"\n")
    path.write_bytes(raw)
    found = list(lines.blocks([path, path], length))
    assert b"".join(one.text for one in found) == raw + raw
    for one in found:
        assert one.text.endswith(b"\n") or raw.endswith(one.text)
        assert raw.split(b"\n")[one.first - 1] == one.text.split(b"\n")[0]
    assert sum(one.read for one in found) == 2 * len(raw)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"in, line 52: no JSON: Expecting ',' delimiter"),
        (b"[1]", "line 52: no object of JSON"),
        (
            b'{"title": "a"}',
            r"line 52: 'text' is no text in it \(there is title\): see --json-keys",
        ),
        (b'{"text": 5}', r"line 52: 'text' is no text in it \(there is int\)"),
        (b'{"text": "\\ud800"}', r"line 52: half a character, '\\ud800'"),
        (b'{"text": "\xff"}', "line 52: no JSON: 'utf-8' codec"),
        pytest.param(b"[" * 200_000, "line 52: no JSON: maximum recursion", id="too deep"),
    ],
)
def test_the_first_bad_line_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, message: str
) -> None:
    monkeypatch.setattr(lines, "BLOCK", 300)
    path = tmp_path / "in"
    path.write_bytes(lines_of(["ab"] * 50) + b"\n" + line + b"\n" + b"worse\n" * 99)
    with pytest.raises(UsageError, match=message):
        preprocess([path], f"{tmp_path}/out", SETTINGS, workers=2)
    assert [one.name for one in tmp_path.iterdir()] == ["in"]


def test_so_is_the_first_text_that_is_no_ids(tmp_path: Path) -> None:
    null = TokenizerFlags(tokenizer_type="NullTokenizer", vocab_size=9)
    settings = Settings(tokenizer=null, keys=("text", "other"), append_eod=True)
    path = tmp_path / "in"
    good, late, early = (
        json.dumps({"text": text, "other": other}).encode()
        for text, other in (("1 2", "3"), ("one", "1"), ("1", "77"))
    )
    path.write_bytes(b"\n".join([good, b"", good, early, late, b"worse"]))
    with pytest.raises(UsageError, match="in, line 4: id 77 is not below"):
        preprocess([path], f"{tmp_path}/out", settings, workers=1)
    path.write_bytes(b"\n".join([good, late, b"worse"]))
    with pytest.raises(UsageError, match="in, line 2: a text for NullTokenizer is whole numbers"):
        preprocess([path], f"{tmp_path}/out", settings, workers=1)


def test_damaged_and_missing_input_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.gz"
    path.write_bytes(gzip.compress(lines_of(["a"] * 9))[:-9])
    with pytest.raises(UsageError, match=r"cannot read .*in\.gz: Compressed file ended"):
        preprocess([path], f"{tmp_path}/out", SETTINGS, workers=1)
    path.write_bytes(b"\n \n")
    with pytest.raises(UsageError, match=r"there is no document in .*in\.gz"):
        preprocess([path], f"{tmp_path}/out", SETTINGS, workers=1)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "none", "no*"):
        with pytest.raises(UsageError, match=f"--input .*{name[:2]}.*: there is no such file"):
            lines.files([str(tmp_path / name)])


@pytest.mark.parametrize("name", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_another_encoding_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "in"
    for pack in (bytes, gzip.compress):
        path.write_bytes(pack(lines_of(["a", "b"]).decode().encode(name)))
        with pytest.raises(UsageError, match=f"in is {name[:6].upper()}: make it UTF-8"):
            list(lines.blocks([path]))
    path.write_bytes(lines_of(["a"]).decode().encode("utf-8-sig"))
    preprocess([path], f"{tmp_path}/out", SETTINGS, workers=1)
    assert documents(tmp_path / "out_text_document") == expected(["a"])


def test_a_hyphen_is_standard_input(tmp_path: Path) -> None:
    read = "from elastic.trainer.data import lines; print(*lines.blocks(lines.files(['-'])))"
    command = [sys.executable, "-c", read]
    told = subprocess.run(command, cwd=ROOT, input=b"{}\n", capture_output=True, check=True)
    assert b"/dev/stdin" in told.stdout
    assert b"{}" in told.stdout


def test_a_disk_that_takes_no_more_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(lines_of(["words " * 1000] * 300))
    with (
        files_of_at_most(100_000),
        pytest.raises(UsageError, match=r"cannot write .*out_text_document\.bin: File too large"),
    ):
        preprocess([tmp_path / "in"], f"{tmp_path}/out", SETTINGS, workers=1)
    assert [one.name for one in tmp_path.iterdir()] == ["in"]


def encoders() -> list[psutil.Process]:  # who serves other tests is a child of ours, too
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it is dead already
            found += [child] * ("elastic.trainer.data.encoding" in child.cmdline())
    return found


def test_more_workers_than_can_be_started_are_told_and_none_is_left(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(lines_of(["a"]))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir("/proc/self/fd")))
    free = (number for number in itertools.count() if number not in taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, 30, None)), before[1]))
    try:
        with pytest.raises(
            UsageError, match=r"of --workers 99, \d+ could be started: Too many open files; give it"
        ):
            preprocess([tmp_path / "in"], f"{tmp_path}/out", SETTINGS, workers=99)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not encoders()
    assert [one.name for one in tmp_path.iterdir()] == ["in"]


def test_a_process_that_is_killed_ends_it_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BLOCK", 1000)
    (tmp_path / "in").write_bytes(lines_of(["ab"] * 5000))

    def kill(_: Done) -> None:
        for child in encoders():
            child.kill()

    with pytest.raises(UsageError, match="a process that encodes was killed: with less memory"):
        preprocess([tmp_path / "in"], f"{tmp_path}/out", SETTINGS, workers=2, told=kill)
    assert [one.name for one in tmp_path.iterdir()] == ["in"]
    assert not encoders()


# --- the verbs -----------------------------------------------------------------------------------


def test_preprocess_as_on_megatrons_command_line(tmp_path: Path, ask: Ask) -> None:
    (tmp_path / "in.json").write_bytes(lines_of(TEXTS, title="A"))
    told = [
        f"--input={tmp_path / 'in.json'}", f"--output-prefix={tmp_path / 'new' / 'my'}",
        *FLAGS, "--tokenizer-type=GPT2BPETokenizer", "--dataset-impl=mmap", "--append-eod",
        "--workers=2", "--chunk-size=25", "--json-keys", "text", "title", "--log-interval=5",
    ]  # fmt: skip
    answer = ask("data", "preprocess", *told)
    assert answer.code == 0, answer.err
    assert documents(tmp_path / "new" / "my_text_document") == expected(TEXTS)
    assert documents(tmp_path / "new" / "my_title_document") == [[32, 50256]] * len(TEXTS)
    assert "--chunk-size is of Megatron's tool, and has no effect here" in answer.err
    assert f"Processed {len(TEXTS)} documents (" in answer.err
    assert f"Processed {len(TEXTS)} documents (" in answer.out
    assert json.loads(ask("-o", "json", "data", "preprocess", *told).out)["documents"] == 18


def test_lists_that_are_given_twice_are_one(tmp_path: Path, ask: Ask) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(lines_of([name], title="A"))
    told = ["--input", tmp_path / "a", "--json-keys", "text", "--input", tmp_path / "b"]
    more = ["--json-keys", "title", "--output-prefix", tmp_path / "out", *FLAGS, "--append-eod"]
    answer = ask("data", "preprocess", *told, *more)
    assert answer.code == 0, answer.err
    assert documents(tmp_path / "out_text_document") == expected(["a", "b"])
    assert documents(tmp_path / "out_title_document") == expected(["A", "A"])


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--split-sentences"], 2, "--split-sentences: documents stay whole"),
        (["--dataset-impl=lazy"], 2, "--dataset-impl lazy: there is mmap"),
        (["--workers=0"], 2, "at least 1"),
        (["--json-keys", "a", "a"], 2, "each only once"),
        (["--json-keys", "a", "--json-keys", "a"], 2, "each only once"),
        (["--merge-file=none"], 1, "cannot read none: No such file"),
        (["--tokenizer-type=BertWordPieceCase"], 1, "there is GPT2BPETokenizer"),
        (["--output-prefix="], 2, "--output-prefix: '' has no name in it: write FOLDER/NAME"),
        (["--output-prefix=new/"], 2, "'new/' has no name in it"),
        (["--output-prefix=new/.."], 2, "'new/..' has no name in it"),
        (["--find-optimal-num-workers"], 2, "unrecognized arguments"),
    ],
)
def test_what_preprocess_does_not_take(
    tmp_path: Path, ask: Ask, more: list[str], code: int, message: str
) -> None:
    (tmp_path / "in").write_bytes(lines_of(["a"]))
    told = [f"--input={tmp_path / 'in'}", f"--output-prefix={tmp_path / 'out'}", *FLAGS, *more]
    answer = ask("data", "preprocess", *told)
    assert (answer.code, answer.out) == (code, "")
    assert message in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("kind", ["bin", "idx"])
def test_what_is_read_is_not_written_over(tmp_path: Path, ask: Ask, kind: str) -> None:
    """By whatever name it goes."""
    file = tmp_path / f"my_text_document.{kind}"
    file.write_bytes(lines_of(["a"]))
    (tmp_path / "in").symlink_to(file)
    for name in (file, tmp_path, tmp_path / "in"):
        told = ["--input", name, "--output-prefix", tmp_path / "new" / ".." / "my", *FLAGS]
        answer = ask("data", "preprocess", *told)
        assert answer.code == 1
        assert f"my_text_document.{kind} would be written over, and is read: give" in answer.err
        assert file.read_bytes() == lines_of(["a"])


def test_merged_is_as_if_preprocessed_together(tmp_path: Path, ask: Ask) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, texts in (("b", TEXTS[:5]), ("a", TEXTS[5:]), ("all", TEXTS[5:] + TEXTS[:5])):
        (tmp_path / name).write_bytes(lines_of(texts))
        place = tmp_path if name == "all" else parts
        preprocess([tmp_path / name], str(place / name), SETTINGS, workers=1)
    answer = ask("data", "merge", "--input", parts, "--output-prefix", tmp_path / "merged")
    assert answer.out == f"{tmp_path}/merged: {len(TEXTS)} documents of 2 datasets\n", answer.err
    for kind in ("bin", "idx"):
        merged = (tmp_path / f"merged.{kind}").read_bytes()
        assert merged == (tmp_path / f"all_text_document.{kind}").read_bytes()
    again = ask("data", "merge", "--input", parts, "--output-prefix", parts / "a_text_document")
    assert f"{parts}/a_text_document.bin would be written over, and is read: give" in again.err
    assert "'' has no name in it" in ask("data", "merge", "--input", parts, "--output-prefix=").err
    (parts / "b_text_document.idx").unlink()
    lacking = ask("data", "merge", "--input", parts, "--output-prefix", tmp_path / "m")
    assert lacking.code == 1
    assert f"{parts}/b_text_document.idx is missing, so {parts}/b_text_doc" in lacking.err


def test_inspect_says_what_is_there(tmp_path: Path, ask: Ask) -> None:
    (tmp_path / "in").write_bytes(lines_of(["Hello world", "", "end"]))
    preprocess([tmp_path / "in"], f"{tmp_path}/x", SETTINGS, workers=1)
    prefix = f"{tmp_path}/x_text_document"
    told = json.loads(ask("-o", "json", "data", "inspect", prefix).out)
    shown = told.pop("shown")
    assert told == {
        "prefix": prefix, "dtype": "uint16", "documents": 3, "empty_documents": 1, "sequences": 2,
        "tokens": 5, "shortest": 2, "longest": 3,
    }  # fmt: skip
    assert [one["tokens"] for one in shown] == expected(["Hello world", "", "end"])
    answer = ask("data", "inspect", prefix, *FLAGS, "--documents=1")
    assert "Hello world<|endoftext|>" in answer.out
    assert "end<" not in answer.out
    assert answer.err == ""
    small = ask("data", "inspect", prefix, "--tokenizer-type=NullTokenizer", "--vocab-size=50000")
    assert "token id 50256 is not below the tokenizer's 50001: these are another" in small.err
    wrong = ask("data", "inspect", prefix, "--documents=-5")
    assert (wrong.code, wrong.out) == (2, "")
    assert "--documents: '-5' is no number from 0 up" in wrong.err
    (tmp_path / "x_text_document.bin").write_bytes(b"12")
    assert "x_text_document.bin has 2 bytes where" in ask("data", "inspect", prefix).err


@pytest.mark.parametrize(
    "verb",
    [
        ("data", "inspect", "p"),
        ("data", "merge", "--input", "d", "--output-prefix", "p"),
        ("hf", "export", "a", "b"),
        ("hf", "import", "a", "b"),
        ("ckpt", "ls", "a"),
    ],
)
def test_a_flag_that_there_is_not_is_told_with_the_verbs_own_usage(
    ask: Ask, verb: tuple[str, ...]
) -> None:
    answer = ask(*verb, "--bogus")
    assert answer.code == 2
    assert answer.err.startswith(f"usage: elasticctl {verb[0]} {verb[1]} [-h]")
    assert "error: unrecognized arguments: --bogus" in answer.err


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is gone when it is done."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    shown, terminal = pty.openpty()
    with open(terminal, "w") as err:
        monkeypatch.setattr(sys, "stderr", err)
        out: Any = None  # which only lines go to
        with commands._progress(1000, 1, out) as told:
            told(Done(documents=7, read=250, text=200, tokens=50))
    with open(shown, "rb", buffering=0) as screen:
        text = b"".join(pieces(screen)).decode()
    assert " 25%" in text
    assert "Processed 7 documents (" in text
    assert text.endswith("\x1b[2K"), "the line is empty again"


def pieces(screen: IO[bytes]) -> Iterator[bytes]:
    """What a terminal was shown until it was closed."""
    with contextlib.suppress(OSError):  # so Linux says that nobody has it any more
        while piece := screen.read(4096):
            yield piece


def test_interrupted_it_leaves_nothing(tmp_path: Path) -> None:
    """^C goes to all processes of the terminal."""
    os.mkfifo(tmp_path / "in")
    program = (
        "import sys; from elastic.trainer.data.commands import data; from elastic import ctl; "
        "from elastic.proto.verbs import Context; "
        "data(Context(out=ctl._Terminal('table'), find=None), sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "preprocess", f"--input={tmp_path / 'in'}"]
    command += [f"--output-prefix={tmp_path}/out", *FLAGS, "--workers=2", "--log-interval=1"]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        with opened(tmp_path / "in", process) as pipe:
            pipe.write(lines_of(["ab"] * 500_000))  # more than is read ahead
            pipe.flush()
            assert "Processed" in process.stderr.readline()
            assert any(one.name.endswith(".draft") for one in tmp_path.iterdir())
            os.killpg(process.pid, signal.SIGINT)
        # Who reads a pipe hears of it where the pipe ends: it ended with who wrote it.
        assert "Traceback" not in process.stderr.read().partition("KeyboardInterrupt")[2]
        assert process.wait() == -signal.SIGINT
    assert [one.name for one in tmp_path.iterdir()] == ["in"]


def test_what_a_killed_run_left_goes_with_the_next_one(tmp_path: Path) -> None:
    end = f"x1_y@{socket.gethostname()}.draft"
    for name in ("out_text_document.bin", "out_text_document.idx", "other_text_document.bin"):
        (tmp_path / f".{name}.{end}").write_bytes(b"half")
    (tmp_path / "in").write_bytes(lines_of(["a"]))

    def while_another_runs(_: Done) -> None:
        preprocess([tmp_path / "in"], f"{tmp_path}/out", SETTINGS, workers=1)

    preprocess([tmp_path / "in"], f"{tmp_path}/out", SETTINGS, workers=1, told=while_another_runs)
    assert documents(tmp_path / "out_text_document") == expected(["a"])
    assert {one.name for one in tmp_path.iterdir()} == {
        "in", "out_text_document.bin", "out_text_document.idx", f".other_text_document.bin.{end}",
    }  # fmt: skip


def opened(pipe: Path, reader: subprocess.Popen[str]) -> IO[bytes]:
    """For writing, once it is read; a reader that ends first, or never comes, is told of by what it wrote."""
    found: list[int] = []

    def tried() -> bool:
        try:
            found.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
        return bool(found) or reader.poll() is not None

    try:
        wait_for("the pipe is read", tried, 120)
        assert found, f"it ended with {reader.returncode}"
    except AssertionError as error:
        reader.kill()
        assert reader.stderr is not None
        raise AssertionError(f"{error}: {reader.stderr.read()}") from error
    os.set_blocking(found[0], True)
    return os.fdopen(found[0], "wb")
