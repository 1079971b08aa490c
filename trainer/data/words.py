"""GPT-2's tokenizer for preprocessing: each word is encoded once and remembered as its bytes.

What byte-level BPE does to a text, it does to each of its words alone: so most of a corpus is found in a
table, several times faster than the library cuts and encodes it again. The words are cut here as GPT-2's
pattern cuts them, for characters below `KNOWN` (Latin and its punctuation), whose classes no version of
Unicode changes. What has another character, from one white space to the next, is one word here, and cut by
the library: GPT-2's pattern never looks over a white space that is followed by something else.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

from elastic.trainer.data.tokenizers import TextTokenizer

MOST = 1 << 18
"""Words that are remembered; some 40 MB."""
LONGEST = 64
"""Characters of a word that is remembered."""
KNOWN = 0x0250
"""Characters below it are cut here, and those of `PUNCTUATION`."""
PUNCTUATION = "\u2013\u2014\u2018\u2019\u201c\u201d\u2022\u2026\u20ac"
"""What is common in English text."""

SPACE = "\t\n\v\f\r \x85\xa0"
"""What is white space there. (Python's own has four control characters more.)"""


def _known(kind: str) -> str:
    """The known characters of a class, for within brackets."""
    found = (chr(code) for code in range(KNOWN) if unicodedata.category(chr(code))[0] == kind)
    return re.escape("".join(found))


_LETTERS, _NUMBERS, _SPACE = _known("L"), _known("N"), re.escape(SPACE)
_WORD = re.compile(
    f"'s|'t|'re|'ve|'m|'ll|'d| ?[{_LETTERS}]+| ?[{_NUMBERS}]+| ?[^{_SPACE}{_LETTERS}{_NUMBERS}]+"
    f"|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
)
_UNKNOWN = f"[^\x00-{chr(KNOWN - 1)}{PUNCTUATION}]"
_HAS_UNKNOWN = re.compile(_UNKNOWN)
_WITH_UNKNOWN = re.compile(f"((?:[{_SPACE}]|\\A)[^{_SPACE}]*{_UNKNOWN}[^{_SPACE}]*)")
_OTHER_SPACE = re.compile("[\u1680\u180e\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")


class Words(dict[str, bytes]):
    """What a tokenizer makes of words: their ids as bytes of one type."""

    def __init__(self, tokenizer: TextTokenizer, dtype: np.dtype[Any]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._dtype = dtype

    def __missing__(self, word: str) -> bytes:
        found = self._by_library(word)
        if len(word) <= LONGEST:
            if len(self) >= MOST:
                self.clear()
            self[word] = found
        return found

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text, one behind the other, as they lie in a .bin."""
        return [self._encoded(text) for text in texts]

    def _encoded(self, text: str) -> bytes:
        if not _HAS_UNKNOWN.search(text):
            return b"".join(map(self.__getitem__, _WORD.findall(text)))
        if _OTHER_SPACE.search(text):
            return self._by_library(text)
        found: list[bytes] = []
        for number, part in enumerate(_WITH_UNKNOWN.split(text)):
            words = [part] if number % 2 else _WORD.findall(part)
            found += map(self.__getitem__, words)
        return b"".join(found)

    def _by_library(self, text: str) -> bytes:
        return np.array(self._tokenizer.encode([text])[0], self._dtype).tobytes()
