"""The command line, a YAML file and a program's own defaults to `Settings`."""

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Any

from elastic.proto.errors import UsageError
from elastic.trainer.arguments import options, refused, yaml_file
from elastic.trainer.arguments.settings import Settings, subjects
from elastic.trainer.arguments.unused import UNUSED, Unused

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
"""Megatron's `extra_args_provider`: adds a team's own arguments."""


def parse(
    arguments: Sequence[str],
    extra_args_provider: Provider | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> Settings:
    """What a run is told. Raises `UsageError`; `--help` writes to stdout and ends the process.

    The command line wins over the file that its `--yaml-cfg` names, and that over `args_defaults`,
    by Megatron's names with underscores.
    """
    parser, own = _parser(extra_args_provider)
    passed: list[str] = []
    words = _words(parser, args_defaults or {}, passed, "args_defaults")
    sources = [arguments]
    if file := _file(arguments):
        sources.append(_words(parser, yaml_file.read(file), passed, f"--yaml-cfg {file}"))
        words += sources[-1]
    for source in sources:
        options.check_agree(subjects().values(), source)
        options.check_once(subjects().values(), source)
    given, rest = parser.parse_known_args([*words, *arguments])
    _check_rest(parser, rest, passed)
    found = vars(given)
    unused = {name: found[name] for name in UNUSED if name in found}
    return Settings(
        **{name: _filled(kind, found) for name, kind in subjects().items()},
        unused=unused,
        team={name: found[name] for name in own},
        passed=tuple(passed),
    )


def flags() -> Collection[str]:
    """All that is accepted, with its dashes."""
    return _parser(None)[0]._option_string_actions.keys()


def _parser(provider: Provider | None) -> tuple[argparse.ArgumentParser, set[str]]:
    """The parser, and the names of a team's own arguments."""
    parser = options.Parser(
        usage="elastic-run ... -m elastic.trainer.pretrain_gpt ARGUMENTS",
        description="Train a GPT. Arguments are Megatron-LM's, where it has them.",
        allow_abbrev=False,
    )
    seen: set[str] = set()
    for kind in subjects().values():
        title, _, _ = (kind.__doc__ or "").partition(".")
        options.add(parser.add_argument_group(title), kind, but=seen)
        seen |= {one.name for one in fields(kind)}
    group = parser.add_argument_group("Files")
    group.add_argument("--yaml-cfg", metavar="FILE", help="Arguments; those given beside it win.")
    group = parser.add_argument_group("Without effect here")
    for name, one in UNUSED.items():
        _add_unused(group, name, one)
    known = {action.dest for action in parser._actions}
    if provider is not None:
        try:
            provider(parser)
        except argparse.ArgumentError as error:
            raise UsageError(f"a script's own argument is one of ours already: {error}") from error
    return parser, {action.dest for action in parser._actions} - known


def _add_unused(group: Any, name: str, one: Unused) -> None:
    reading = {"choices": one.only or None, "metavar": "WORD"} if one.words else options.SWITCH
    group.add_argument(
        *one.flags(name), dest=name, default=argparse.SUPPRESS, help=one.why, **reading
    )


def _file(arguments: Sequence[str]) -> str | None:
    parser = options.Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--yaml-cfg")
    found: str | None = parser.parse_known_args(arguments)[0].yaml_cfg
    return found


def _check_rest(parser: argparse.ArgumentParser, rest: Sequence[str], passed: list[str]) -> None:
    """Raises for the first argument that is neither accepted nor to be passed over."""
    flags = [at for at, word in enumerate(rest) if word.startswith("--")]
    if rest and 0 not in flags:
        raise UsageError(f"{rest[0] or 'an empty word'} belongs to no argument: leave it out")
    for at, after in pairwise([*flags, len(rest)]):
        flag, _, value = rest[at].partition("=")
        words = [value] if value else rest[at + 1 : after]
        if refused.reason(flag) is None or not refused.asks_nothing(flag, words):
            raise UsageError(refused.sentence(flag, parser._option_string_actions))
        passed.append(flag)


def _filled(kind: type, found: Mapping[str, Any]) -> Any:
    """A subject, of what was given."""
    values = {}
    for one in fields(kind):
        if one.name in found:
            value = found[one.name]
            values[one.name] = tuple(value) if isinstance(value, list) else value
        elif one.default is MISSING and one.default_factory is MISSING:
            raise UsageError(
                f"give {options.flag_of(one.name)}: {options.doc_strings(kind)[one.name]}"
            )
    return kind(**values)


def _words(
    parser: argparse.ArgumentParser, values: Mapping[str, Any], passed: list[str], source: str
) -> list[str]:
    """What the command line would have said. None is "not given". source: where the values are from."""

    def no_such(name: str) -> UsageError:
        return UsageError(f"{source}: {refused.sentence(name, parser._option_string_actions)}")

    by_name = {action.dest: action for action in reversed(parser._actions)}
    words = []
    for name, value in values.items():
        flag = options.flag_of(name)
        action = by_name.get(name) or parser._option_string_actions.get(flag)
        if action is None and refused.reason(name) is None:
            raise no_such(name)
        if value is None:
            continue
        said = [str(one) for one in value] if isinstance(value, (list, tuple)) else [str(value)]
        if action is None:
            if not refused.asks_nothing(name, said):
                raise no_such(name)
            if value is not False:
                passed.append(flag)
        else:
            words += _said(action, value, said)
    return words


def _said(action: argparse.Action, value: Any, words: list[str]) -> list[str]:
    flag = action.option_strings[0]
    if action.nargs == 0:  # a team's store_true
        return [flag] if value else []
    return [flag, *words] if isinstance(value, (list, tuple)) else [f"{flag}={words[0]}"]
