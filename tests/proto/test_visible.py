"""What a terminal gets to see of texts from elsewhere."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.proto.visible import visible


def test_escapes_are_written_out() -> None:
    assert visible("\x1b]0;title\x07 \u202egnp.exe\r\x9b\udc80") == (
        "\\x1b]0;title\\x07 \\u202egnp.exe\\r\\x9b\\udc80"
    )


def test_what_can_be_shown_stays() -> None:
    assert visible("Zürich, 東京:\n\tok") == "Zürich, 東京:\n\tok"


@given(st.text())
def test_nothing_is_left_to_obey(text: str) -> None:
    shown = visible(text)
    assert all(char.isprintable() or char in "\n\t" for char in shown)
    shown.encode()  # raises for half of a surrogate
    assert visible(shown) == shown
