"""An argparse parser for a command line that adds flags to torchrun's.

torchrun's flags mean what torchrun makes of them, abbreviations too. The others must be written out,
so that a flag we add never changes the meaning of a command line written for torchrun.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag, in both spellings (`--a-b`, `--a_b`)."""

    name: str
    """Long name with dashes and without the two in front."""
    short: str = ""
    """One letter, or none."""
    type: Callable[[str], Any] = str
    """Turns the text into a value; also what an environment variable holds."""
    default: Any = None
    """Value where neither the command line nor the environment has one."""
    choices: tuple[Any, ...] | None = None
    """The values allowed; as in torchrun, argparse does not hold the environment to them."""
    switch: bool = False
    """Takes no value; an environment variable says 0 or 1."""
    repeat: bool = False
    """May be given several times; the values (lists) are joined."""
    in_environment: bool = True
    """Whether an environment variable gives a default."""
    metavar: str | None = None
    """Stands for the value in the help."""
    help: str
    """A line or two for the help."""

    @property
    def dest(self) -> str:
        """Attribute of the parsed arguments, and the tail of the environment variable."""
        return self.name.replace("-", "_")


class Refused(SystemExit):
    """The command line makes no sense: argparse has said so, and ends the program with code 2."""

    def __init__(self, reason: str) -> None:
        super().__init__(2)
        self.reason = reason


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that abbreviates torchrun's flags only, and knows which flags were given."""

    def __init__(self, **settings: Any) -> None:
        self.spelled_out: set[str] = set()
        self.from_environment: set[str] = set()
        super().__init__(**settings)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # What argparse may complete an option to. Private, and a tuple has 3 places or 4 by the
        # version of Python; the candidate's name is the second in all of them (3.11 to 3.14).
        found: list[Any] = super()._get_option_tuples(option_string)
        return [option for option in found if option[1] not in self.spelled_out]

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse; `given` of the result is the set of dests that were set by anyone."""
        args = self.parse_args(argv, argparse.Namespace(given=set()))
        args.given |= self.from_environment
        return args

    def error(self, message: str) -> NoReturn:
        try:
            super().error(message)
        except SystemExit as ended:
            raise Refused(message) from ended

    def add_flags(
        self,
        title: str,
        flags: Iterable[Flag],
        environ: Mapping[str, str],
        prefix: str,
        *,
        description: str,
        abbreviate: bool,
    ) -> None:
        """Add a group of flags; a variable of `environ` named `prefix` + DEST gives a default."""
        group = self.add_argument_group(title, description)
        for flag in flags:
            names = [f"-{flag.short}"] if flag.short else []
            names += dict.fromkeys((f"--{flag.name}", f"--{flag.dest}"))
            if not abbreviate:
                self.spelled_out.update(names)
            settings: dict[str, Any] = {"type": flag.type, "metavar": flag.metavar}
            group.add_argument(
                *names,
                action=_Switch if flag.switch else _Join if flag.repeat else _Store,
                default=self._default(flag, environ, prefix + flag.dest.upper()),
                choices=flag.choices,
                help=flag.help,
                **({"nargs": 0} if flag.switch else settings),
            )

    def _default(self, flag: Flag, environ: Mapping[str, str], name: str) -> Any:
        if name not in environ or not flag.in_environment:
            return False if flag.switch else flag.default
        text = environ[name]
        if text:
            self.from_environment.add(flag.dest)
        if not flag.switch:
            return text  # argparse applies the type, if the command line does not say otherwise
        try:
            return bool(int(text))
        except ValueError:
            self.error(f"{name}={text!r} in the environment: write 0 or 1")


def _note(namespace: argparse.Namespace, dest: str) -> bool:
    """Note that the command line gave `dest`; whether it had done so before."""
    before = dest in namespace.given
    namespace.given.add(dest)
    return before


class _Store(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        _note(namespace, self.dest)
        setattr(namespace, self.dest, values)


class _Switch(_Store):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        super().__call__(parser, namespace, True, option_string)


class _Join(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        # The first on the command line takes the place of the environment's.
        before = getattr(namespace, self.dest) if _note(namespace, self.dest) else []
        setattr(namespace, self.dest, [*before, *values])


class HelpFormatter(argparse.HelpFormatter):
    """Shows each flag in one spelling, with dashes."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(name for name in action.option_strings if "_" not in name)
        if not names or action.nargs == 0:
            return names or super()._format_action_invocation(action)
        default = self._get_default_metavar_for_optional(action)
        return f"{names} {self._format_args(action, default)}"
