"""Jinja as Hugging Face's chat templates expect it, in a sandbox."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megalite.config.errors import UserError
from megalite.data.jsonl import NONCHARACTERS
from megalite.data.text_input import excerpt

OPEN, CLOSE = NONCHARACTERS[2], NONCHARACTERS[3]  # around what `{% generation %}` encloses


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks what it encloses."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Macro) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


def template_environment() -> Environment:
    """Jinja with the settings, filters and functions that Hugging Face's templates are written for. `strftime_now`
    isn't there: what is trained on must not depend on the day."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def keys_and_variables(source: str) -> tuple[set[str], set[str]]:
    """The keys that a program takes of objects, by `.key`, `['key']` or `get('key')`, and the variables that it
    reads."""
    tree = template_environment().parse(source)
    keys = {each.attr for each in tree.find_all(nodes.Getattr)}
    named = [each.arg for each in tree.find_all(nodes.Getitem)]
    gets = (call for call in tree.find_all(nodes.Call) if getattr(call.node, "attr", "") == "get")
    named += [call.args[0] for call in gets if call.args]
    keys |= {each.value for each in named if isinstance(each, nodes.Const)}
    return keys, {each.name for each in tree.find_all(nodes.Name) if each.ctx == "load"}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def with_parsed_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with the `arguments` of its tool calls as objects, which is what templates expect. OpenAI's form has
    them as JSON in a string, and a template that writes JSON would write that string as a string once more. Raises
    UserError for arguments that are neither."""
    calls = message.get("tool_calls")
    return message if calls is None else {**message, "tool_calls": _parsed_calls(calls)}


def _parsed_calls(value: Any) -> Any:
    if isinstance(value, list):
        return [_parsed_calls(each) for each in value]
    if not isinstance(value, dict):
        return value
    change = {"function": _parsed_calls, "arguments": _arguments}
    return {key: change[key](each) if key in change else each for key, each in value.items()}


def _arguments(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    with contextlib.suppress(ValueError):
        value = json.loads(given or "{}")
        if isinstance(value, dict):
            return value
    raise UserError(f"the arguments of a tool call must be an object, or JSON of one, not {excerpt(given)}")
