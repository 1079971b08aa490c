"""Texts from elsewhere - a rank's exception, another node's reason - on somebody's terminal."""


def visible(text: str) -> str:
    """`text` with every character that a terminal would obey, or not show, written as in Python's
    literals (an ESC as \\x1b); line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char in "\n\t"
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
