"""Which regular expressions a job's master takes from its user: it tries them on its event loop, which serves. Pure."""

import re

_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_AGAIN = re.compile(r"[*+]|\{\d*,?\d*\}")
_REPEAT = re.compile(r"[*+?]|\{\d*,\d*\}")


def wrong(pattern: str) -> str:
    """Why it is not taken; empty: it is."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    if _explodes(pattern):
        return "a group that repeats, or has a choice, is repeated: that may take for ever"
    return ""


def _explodes(pattern: str) -> bool:
    """Each way to divide a text among such a group's turns is tried where it nearly matches: 2 to the power of its
    length of them. One that is compiled, and so has its brackets in pairs."""
    groups, at = [False], 0  # of each that is open: what it matches may be longer or shorter
    while at < len(pattern):
        here = pattern[at]
        if here == "\\":
            at += 2
            continue
        if here == "[" and (found := _CLASS.match(pattern, at)):
            at = found.end()
            continue
        if here == "(":
            groups.append(False)
            at += pattern.startswith("(?", at)
        elif here == ")" and len(groups) > 1:
            varies = groups.pop()
            if varies and _AGAIN.match(pattern, at + 1):
                return True
            groups[-1] |= varies
        elif here == "|" or _REPEAT.match(pattern, at):
            groups[-1] = True
        at += 1
    return False
