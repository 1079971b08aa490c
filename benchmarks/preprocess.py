"""Text to indexed files: `elasticctl data preprocess`, beside what Megatron's tool does, of its own parts.

In turn, on the same text: that of the Python files and documentation that are installed here, each a
document. GPT-2's vocabulary where it is given, else one of its size that is trained on the text first. What
both write is compared, byte by byte.
"""

import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.jobs import SCRIPTS
from benchmarks.table import Row, Sample

VOCABULARY = 50257
SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp"}


def rows(
    python: Path, mb: float, workers: int, n: int, vocabulary: tuple[Path, Path] | None
) -> list[Row]:
    """`n` times each. python: an interpreter that has megatron-core and tokenizers."""
    ours = Sample(launcher="elasticctl data preprocess", unit="kB/s")
    peer = Sample(launcher=f"Megatron's loop, {_tokenizer(python)}", unit="kB/s")
    what = f"{mb:g} MB of text to .bin and .idx, {workers} workers"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "text.jsonl"
        size = _write(source, int(mb * 1e6))
        vocab, merges = vocabulary or _train(source, folder)
        for _ in range(n):
            for sample, command in (
                (ours, _ours(source, folder, vocab, merges, workers)),
                (peer, _megatrons(python, source, folder, vocab, merges, workers)),
            ):
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    sample.fail(done.stderr.strip().splitlines()[-1])
                    continue
                told = json.loads(done.stdout)
                sample.add(size / 1e3 / (told if isinstance(told, float) else told["seconds"]))
        if ours.values and peer.values:
            for kind in ("bin", "idx"):
                mine, its = (folder / f"{one}.{kind}" for one in ("ours_text_document", "peer"))
                if mine.read_bytes() != its.read_bytes():
                    ours.notes.append(f"the .{kind} is another than the peer's")
    return [Row(measure=what, ours=ours, peers=[peer])]


def _ours(source: Path, folder: Path, vocab: Path, merges: Path, workers: int) -> list[str]:
    return [
        sys.executable, "-m", "elastic.ctl", "-o", "json", "data", "preprocess",
        f"--input={source}", f"--output-prefix={folder / 'ours'}", f"--vocab-file={vocab}",
        f"--merge-file={merges}", "--append-eod", f"--workers={workers}",
    ]  # fmt: skip


def _megatrons(
    python: Path, source: Path, folder: Path, vocab: Path, merges: Path, workers: int
) -> list[str]:
    script = str(SCRIPTS / "megatron_preprocess.py")
    places = (source, folder / "peer", vocab, merges)
    return [str(python), script, *map(str, places), str(workers)]


def _tokenizer(python: Path) -> str:
    found = subprocess.run([python, "-c", "import transformers"], capture_output=True, check=False)
    return "tokenizers" if found.returncode else "GPT2TokenizerFast"


def _write(path: Path, size: int) -> int:
    """Texts of about that many bytes, one a line; how many bytes the file has."""
    used = 0
    with path.open("w", encoding="utf-8") as file:
        for text in _texts():
            used += file.write(json.dumps({"text": text}) + "\n")
            if used >= size:
                break
    return used


def _texts() -> Iterator[str]:
    places = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    for path in (one for place in places for one in sorted(Path(place).rglob("*"))):
        if path.suffix in SUFFIXES and path.is_file() and path.stat().st_size < 1_000_000:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if "<|" not in text:  # what the two take for special in a text differs, by intention
                yield text


def _train(source: Path, folder: Path) -> tuple[Path, Path]:
    """A vocabulary as large as GPT-2's, of the text's first part."""
    from tokenizers import ByteLevelBPETokenizer

    with source.open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(2000), strict=False)]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, vocab_size=VOCABULARY, show_progress=False, special_tokens=["<|endoftext|>"]
    )
    vocab, merges = tokenizer.save_model(str(folder))
    return Path(vocab), Path(merges)
