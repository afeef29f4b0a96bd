"""Command-line flags, generated from the dataclasses of `schema.py`.

Key idea: the parser has no defaults (`argparse.SUPPRESS`), so what it returns is exactly what was given. Precedence
then is plain: a default, overridden by a preset, by a checkpoint, by the command line (`entry.py`).

A script takes all sections (`parse_flags`), or adds the sections it needs beside flags of its own (`build_parser`,
`parse_namespace`, `read_section`). A value lives in the namespace under `section.field`.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from megalite.config.argfiles import expand_argument_files
from megalite.config.errors import FlagError
from megalite.config.fields import (
    FINETUNING,
    Field,
    all_fields,
    pretraining_sections,
    put,
    section_fields,
    take_out,
)
from megalite.config.megatron_flags import (
    USE,
    MegatronFlag,
    current_flags,
    earlier_flags,
    foreign_values,
    shorthands,
)
from megalite.config.schema import RunConfig
from megalite.config.values import whole_number

GIVEN_MEGATRON_FLAGS = "flags of Megatron-LM"  # in a namespace; no flag can collide with a name with blanks
EPILOG = (
    "@FILE reads flags from FILE: any number on a line, # begins a comment. "
    "docs/megatron_flags.md says what happens to Megatron-LM's other flags."
)


_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://\S*")
_FREE = {"--prompt", "--system", "--eval-prompt", "--prompt-init-text", "--adapter"}  # texts; an address too


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser that raises a FlagError where argparse would exit, and where a flag that names a file on this
    machine is given an address."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(
            prog=program,
            usage=f"{program} [@FILE ...] FLAGS",
            description=description,
            epilog=EPILOG,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
        )
        # "-1,0" is a value too (--window-size), not a flag.
        self._negative_number_matcher = re.compile(r"^-[\d.][\d.,eE+-]*$|^-(inf|nan)$")

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found, without its preamble."""
        message = message.removeprefix("argument ")
        raise FlagError(re.sub(r"ignored explicit argument '(.*)'", r"takes no value; remove =\1", message))

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        taking = {field.option for field in all_fields().values() if field.address}
        free = isinstance(action, _TakeMegatronFlag) or not (taking | _FREE).isdisjoint(action.option_strings)
        if _ADDRESS.fullmatch(arg_string) and not free:
            name = "/".join(action.option_strings) or action.metavar or action.dest
            raise FlagError(
                f"{name} {arg_string}: this takes a path on this machine. Addresses like this one are taken by "
                + ", ".join(sorted(taking))
            )
        return super()._get_value(action, arg_string)

    def knows(self, name: str) -> bool:
        """Whether there is a flag of this name."""
        return name in self._option_string_actions

    def nearest(self, name: str) -> str | None:
        """The first flag of this parser that begins with the words of `name`, or the one that is spelt most like it."""
        options = list(self._option_string_actions)
        begun = [option for option in options if option.startswith(f"{name}-") and name.strip("-")]
        matches = begun or difflib.get_close_matches(name, options, n=1, cutoff=0.6)
        return matches[0] if matches else None


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(max(shutil.get_terminal_size().columns, 80), 120)
        super().__init__(prog, max_help_position=36, width=width - 2)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Lines of help that don't break a flag at its hyphens."""
        return textwrap.wrap(text, width, break_on_hyphens=False)


def build_parser(
    program: str, description: str, sections: Sequence[str] | None = None, *, megatron: bool | None = None
) -> FlagParser:
    """A parser of the flags of some sections of `RunConfig`; None: of those that pretraining has.

    `megatron`: take and answer Megatron-LM's other flags too; None: where no sections are named. A script may add
    flags of its own, and parses with `parse_namespace`.
    """
    parser = FlagParser(program, description)
    for section in pretraining_sections() if sections is None else sections:
        add_section(parser, section)
    if sections is None if megatron is None else megatron:
        add_megatron_flags(parser)
    return parser


def add_section(parser: FlagParser, section: str, *, only: Iterable[str] | None = None) -> None:
    """Add the flags of one section as a group. `only`: names of the fields wanted; None: all."""
    wanted = None if only is None else set(only)
    described = getattr(RunConfig(), section).__doc__.strip().splitlines()[0]
    group = parser.add_argument_group(section.replace("_", " "), described)
    for field in section_fields(section):
        if wanted is None or field.name in wanted:
            group.add_argument(field.option, *field.aliases, help=_help(field), **_how_to_store(field))


def add_megatron_flags(parser: FlagParser) -> None:
    """Take Megatron-LM's other flags, out of sight of `--help`; `parse_namespace` answers them."""
    fields, group = all_fields(), parser.add_argument_group()
    for name, (path, value) in shorthands().items():
        store: dict[str, Any] = {"dest": path, "default": argparse.SUPPRESS, "action": "store_const", "const": value}
        group.add_argument(name, help=argparse.SUPPRESS, **(store if value else _how_to_store(fields[path])))
    for flag in [*current_flags(), *earlier_flags()]:
        names = [name for name in flag.names if not parser.knows(name)]  # finetune.py means its own by it
        if names:
            group.add_argument(*names, action=_TakeMegatronFlag, nargs=flag.nargs, flag=flag)


class _TakeMegatronFlag(argparse.Action):
    """Note (flag, spelling, values) in the namespace."""

    def __init__(self, option_strings: Sequence[str], dest: str, nargs: int | str | None, flag: MegatronFlag) -> None:
        super().__init__(option_strings, GIVEN_MEGATRON_FLAGS, nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self.flag = flag

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        words = values if isinstance(values, list) else [values]
        given = getattr(namespace, GIVEN_MEGATRON_FLAGS, [])
        setattr(namespace, GIVEN_MEGATRON_FLAGS, [*given, (self.flag, option_string, words)])


def _how_to_store(field: Field) -> dict[str, Any]:
    """The arguments of `add_argument` that decide what the flag does."""
    store: dict[str, Any] = {"dest": field.path, "default": argparse.SUPPRESS}
    if field.kind is bool:
        return store | {"action": "store_false" if field.turns_off else "store_true"}
    if field.is_list:
        store |= {"nargs": "+", "action": "extend" if field.repeatable else "store"}
    metavar = "NAME" if field.choices else {int: "N", float: "X", str: "TEXT"}[field.kind]
    return store | {"type": _converter(field), "metavar": metavar}


def _converter(field: Field) -> Callable[[str], Any]:
    converters: dict[type, Callable[[str], Any]] = {int: to_int, float: to_float, str: str}
    convert = converters[field.kind]
    if field.choices is None:
        return convert
    foreign = foreign_values().get(field.option, {})

    def choose(text: str) -> Any:
        value = foreign.get(text) or convert(text)
        if value in (field.choices or ()):
            return value
        valid = ", ".join(str(choice) for choice in field.choices or ())
        whose = "would change results and is not supported" if text in foreign else "isn't one of its values"
        raise argparse.ArgumentTypeError(f"{text} {whose}; valid: {valid}")

    return choose


def to_int(text: str) -> int:
    """A whole number; Megatron-LM has floats for some of ours, so `1000.0` is one too."""
    try:
        return whole_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def to_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None


def _help(field: Field) -> str:
    """One line of meaning, the choices and the default."""
    parts = [field.help]
    if field.choices:
        parts.append(f"; one of {', '.join(str(choice) for choice in field.choices)}")
    if field.kind is bool:
        parts.append(" (default: off)")
    elif field.default is not None:
        parts.append(f" (default: {field.default})")
    elif field.needed:
        parts.append(" (needed; no default)")
    elif "default" not in field.help:
        parts.append(" (default: none)")
    return "".join(parts).replace("%", "%%")


def parse_namespace(parser: FlagParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """What was given, and one line for each flag of Megatron-LM that is ignored.

    A FlagError names every unknown flag, with the nearest known one, and every refused flag, and says what to remove.
    """
    namespace, unknown = parser.parse_known_args(expand_argument_files(argv))
    problems, notes, refused = [*_unknown(parser, unknown)], [], []
    for flag, name, values in getattr(namespace, GIVEN_MEGATRON_FLAGS, []):
        message = flag.message(name, values)
        if name == "--no-position-embedding" and not _has_no_table(namespace):
            problems.append(f"{name}: use --position-embedding-type rope or none instead")
        elif flag.refuses(values):
            problems.append(message)
            refused += [" ".join([name, *values])] if flag.answer != USE else []
        elif message not in notes:
            notes.append(message)
    if problems:
        raise FlagError("\n".join([*problems, *take_out(refused)]))
    return namespace, notes


def _has_no_table(namespace: argparse.Namespace) -> bool:
    """Whether a kind of position was given that has no learned table."""
    return vars(namespace).get("model.position_embedding_type", "learned_absolute") != "learned_absolute"


def _unknown(parser: FlagParser, words: Sequence[str]) -> Iterable[str]:
    finetuning = {field.option for field in all_fields().values() if field.section in FINETUNING}
    flags = [word for word in words if word.startswith("-")]
    for flag in flags:
        name = flag.partition("=")[0]
        nearest = parser.nearest(name)
        hint = f"did you mean {nearest}?" if nearest else "--help lists all flags"
        if name in finetuning:
            hint = "it is a flag of finetune.py"
        yield f"unknown flag {name}; {hint}"
    if words and not flags:
        yield f"unexpected {words[0]!r}: a value without a flag before it"


def explicit_fields(namespace: argparse.Namespace) -> set[str]:
    """The paths `section.field` that the command line gave."""
    return set(vars(namespace)) & set(all_fields())


def read_section(namespace: argparse.Namespace, section: str) -> Any:
    """The section's dataclass with what was given; defaults otherwise."""
    values = vars(namespace)
    given = {field.name: values[field.path] for field in section_fields(section) if field.path in values}
    return type(getattr(RunConfig(), section))(**given)


def read_run(namespace: argparse.Namespace) -> RunConfig:
    """A whole configuration with what was given; defaults otherwise."""
    config = RunConfig()
    for path in explicit_fields(namespace):
        put(config, path, vars(namespace)[path])
    return config


def parse_flags(
    argv: Sequence[str], program: str, description: str, sections: Sequence[str] | None = None
) -> tuple[RunConfig, set[str], list[str]]:
    """Parse the flags of a run: the configuration (defaults where nothing was given), the paths that were given, and
    one line for each flag that is ignored. `--help` prints and exits; all mistakes are a FlagError."""
    namespace, notes = parse_namespace(build_parser(program, description, sections, megatron=True), argv)
    return read_run(namespace), explicit_fields(namespace), notes
