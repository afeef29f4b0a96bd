"""Conversations as text: a tokenizer's own chat template, one from a file, or a built-in one.

A chat template is a Jinja program that writes a list of messages as text. It runs in Jinja's sandbox, with the names
and filters that Hugging Face's templates expect. (Jinja is there wherever torch is, which depends on it.)

The key idea: a template doesn't say which text is an answer, but it can be asked. What it writes for the messages
before an answer, ready for the model to begin, is where the answer starts; what it writes for those up to the answer is
where it ends. That holds if the earlier text is the beginning of the later one, which is checked. A template that
marks answers itself with `{% generation %}` is taken at its word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megalite.config.errors import FlagError, UserError
from megalite.data.jsonl import NONCHARACTERS
from megalite.data.segments import BOS_SIGN, EOD_SIGN, Segment, TextEncoder, unguarded
from megalite.data.tokenizer_base import Tokenizer, first_line, read_file
from megalite.data.tokenizer_json import ROLES

CHATML = "chatml"  # the name of the built-in template

Message = Mapping[str, Any]
_OPEN, _CLOSE = NONCHARACTERS[2], NONCHARACTERS[3]
_MARKED = re.compile(f"([{_OPEN}{_CLOSE}])")
_PROBE = "answer0417"  # content that no template writes itself
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

# OpenAI's ChatML; where the tokenizer has no <|im_end|>, the end of a turn is its EOD.
_CHATML_SOURCE = """{{ bos_token }}
{%- for message in messages %}
{%- if message.tool_calls %}{{ raise_exception("it has no form for tool_calls") }}{% endif %}
{{- "<|im_start|>" + message.role + "\\n" + message.content + end_of_turn + "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}
"""


class UnstableTemplateError(UserError):
    """The template writes the beginning of a conversation differently once more messages follow."""


class ChatTemplate:
    """Writes conversations. `name`: for messages. `variables`: what the program sees besides the conversation, such as
    `eos_token`. `protect`: see `TextEncoder.protect`; what messages and tools say is written through it.

    A message is an object with `role` and `content`, and whatever else the template knows (`tool_calls`, ...).
    """

    def __init__(self, source: str, name: str, variables: Mapping[str, str], protect: Callable[[str], str] = str):
        """Raises UserError where `source` isn't a template."""
        self.name, self.source, self.variables, self._protect = name, source, variables, protect
        self.marks_answers = _GENERATION_TAG.search(source) is not None
        try:
            self._template = _environment().from_string(source, globals=dict(variables))
        except TemplateSyntaxError as error:
            raise UserError(f"the chat template {name}, line {error.lineno}: {error.message}") from None

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation, with `add_generation_prompt` ready for the assistant to begin.

        Raises UserError where the template refuses the conversation, in its own words.
        """
        return unguarded(_MARKED.sub("", self._render(messages, tools, add_generation_prompt)))

    def segments(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> list[Segment]:
        """The text of a conversation up to its last answer, cut into context and answers.

        An answer ends with its end of turn; where the template writes none, the last one ends with EOD. Raises
        UserError where there is no answer or the template refuses, UnstableTemplateError where it isn't clear which
        text is an answer.
        """
        answers = _answers(messages)
        if not answers:
            raise UserError("there is no assistant turn")
        if not self.marks_answers:
            return self._cut(messages, tools, answers, ends_here=True)
        result = _marked_segments(self._render(messages[: answers[-1] + 1], tools, False))
        while result and not result[-1].counted:
            result.pop()
        if not result:
            raise UserError(f"the chat template {self.name} marks none of its text with {{% generation %}}")
        return result

    def prompt_segments(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> list[Segment]:
        """The text after which the model answers; earlier answers are cut out where `segments` would, if it can."""
        whole = self._render(messages, tools, True)
        if self.marks_answers:
            return _marked_segments(whole)
        answers = _answers(messages)
        try:
            history = self._cut(messages, tools, answers, ends_here=False) if answers else []
        except UnstableTemplateError:
            history = []
        known = "".join(segment.text for segment in history)
        if not whole.startswith(known):
            history, known = [], ""
        return [*history, Segment(whole[len(known) :], False)]

    def _cut(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, answers: Sequence[int], *, ends_here: bool
    ) -> list[Segment]:
        """Context and answers up to the last answer. `ends_here`: nothing follows it."""
        whole = self._render(messages[: answers[-1] + 1], tools, False)
        result, place = [], 0
        for n in answers:
            before = self._render(messages[:n], tools, True)
            until = whole if n == answers[-1] else self._render(messages[: n + 1], tools, False)
            if not until.startswith(before):
                raise self._unstable(f"message {n + 1} is there")
            if not whole.startswith(until):
                raise self._unstable(f"messages follow message {n + 1}")
            answer = self._answer(until[len(before) :], messages[n], ends_here=ends_here and n == answers[-1])
            result += [Segment(whole[place : len(before)], False), Segment(answer, True)]
            place = len(before) + len(answer)
        return result

    def _answer(self, text: str, message: Message, *, ends_here: bool) -> str:
        """What the model generates of the text that the template adds for an answer."""
        if self._ends_turns or not (message.get("content") or "").strip():
            return text.rstrip()  # an end of turn closes it; nobody generates the blanks that follow
        return text.rstrip() + EOD_SIGN if ends_here else text

    @cached_property
    def _ends_turns(self) -> bool:
        """Whether the template writes anything but blanks after the content of an answer."""
        try:
            text = self._render(
                [{"role": "user", "content": "0"}, {"role": "assistant", "content": _PROBE}], None, False
            )
        except UserError:  # it wants another form of conversation, and so is one of those that write much
            return True
        return bool(text.lower().rpartition(_PROBE)[2].strip())  # a template may write it in capitals

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool) -> str:
        """The text, with guards around what only looks like a special token: a message can't forge a turn."""
        text = self._write(messages, tools, add_generation_prompt)
        guarded, guarded_tools = _each_text(messages, self._protect), _each_text(tools, self._protect)
        if (guarded, guarded_tools) == (list(messages), tools):
            return text
        result = self._write(guarded, guarded_tools, add_generation_prompt)
        if unguarded(result) != text:
            raise UserError(
                f"the chat template {self.name} acts on a special token's text in a message: take that text out, or "
                "give --parse-special-tokens"
            )
        return result

    def _write(self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise UserError(f"the chat template {self.name} refuses it: {first_line(error)}") from None
        except Exception as error:  # a program of unknown origin may fail in any way
            raise UserError(f"the chat template {self.name} fails on it: {first_line(error)}") from None

    def _unstable(self, when: str) -> UnstableTemplateError:
        return UnstableTemplateError(
            f"the chat template {self.name} isn't prefix-stable: it writes the beginning of this conversation "
            f"differently once {when}, so what the answers are can't be told. Give --chat-template {CHATML}, or a "
            "template file that marks answers with {% generation %}, or conversations with one answer each"
        )


class Chat:
    """A chat template and a tokenizer: conversations as ids."""

    def __init__(self, template: ChatTemplate, encoder: TextEncoder):
        self.template, self.encoder = template, encoder

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> list[int]:
        """The ids after which the model answers, as training shows them."""
        return self.ids(self.template.prompt_segments(messages, tools=tools))

    def ids(self, segments: Sequence[Segment]) -> list[int]:
        """The ids of what the template writes."""
        return [i for piece in self.encoder.encode(segments) for i in piece.ids]

    def end_of_turn(self) -> int:
        """The id that ends an answer: generation stops there."""
        messages = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}]
        return self.encoder.encode(self.template.segments(messages))[-1].ids[-1]


def load_chat(choice: str | None, tokenizer: Tokenizer, tokenizer_model: str | None) -> Chat:
    """The chat template that `--chat-template` names: a file (Jinja, or JSON with the key `chat_template`), `chatml`
    for the built-in one, None for the tokenizer's own.

    tokenizer_model: the tokenizer's folder or a file in it; its files name the special tokens that a template writes.
    Raises FlagError where there is no such template, UserError where it can't be read.
    """
    encoder = TextEncoder(tokenizer)
    folder = None
    if tokenizer_model is not None:
        folder = Path(tokenizer_model) if Path(tokenizer_model).is_dir() else Path(tokenizer_model).parent
    if choice == CHATML:
        return Chat(_built_in(encoder), encoder)
    found = _own(folder) if choice is None else _from_file(Path(choice))
    if found is None:
        where = choice or (str(folder) if folder is not None else "this tokenizer")
        raise FlagError(
            f"{where} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): give "
            f"--chat-template {CHATML} or a file"
        )
    source, name = found
    return Chat(ChatTemplate(source, name, _special_tokens(folder, encoder), encoder.protect), encoder)


def _built_in(encoder: TextEncoder) -> ChatTemplate:
    tokenizer = encoder.tokenizer
    begins = tokenizer.bos is not None and encoder.prefix == [tokenizer.bos]
    one_id = len(encoder.ids("<|im_end|>")) == 1
    variables = {"bos_token": BOS_SIGN if begins else "", "end_of_turn": "<|im_end|>" if one_id else EOD_SIGN}
    return ChatTemplate(_CHATML_SOURCE, CHATML, variables, encoder.protect)


def _own(folder: Path | None) -> tuple[str, str] | None:
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        if folder is not None and (folder / name).is_file():
            found = _from_file(folder / name)
            if found is not None:
                return found
    return None


def _from_file(file: Path) -> tuple[str, str] | None:
    """Source and name; None for a JSON file without a template."""
    content = read_file("--chat-template", str(file))
    if file.suffix == ".json":
        template = _json_object(file).get("chat_template")
        if isinstance(template, list):  # several with names
            chosen = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
            template = chosen[0].get("template") if chosen else None
        if template is not None and not isinstance(template, str):
            raise UserError(f"{file}: chat_template is {type(template).__name__}, not text")
        return None if template is None else (template, str(file))
    try:
        return content.decode("utf-8-sig"), str(file)
    except UnicodeDecodeError as error:
        raise UserError(f"--chat-template {file}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _special_tokens(folder: Path | None, encoder: TextEncoder) -> dict[str, str]:
    """What a template writes for each special token: its text as the tokenizer's files have it, or a sign where the
    tokenizer can't read that text back."""
    result: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if folder is None or not (folder / name).is_file():
            continue
        values = _json_object(folder / name)
        for role in ROLES:
            value = values.get(role)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                result.setdefault(role, text)
    tokenizer = encoder.tokenizer
    for role, sign, known in (("eos_token", EOD_SIGN, tokenizer.eod), ("bos_token", BOS_SIGN, tokenizer.bos)):
        if known is not None and (role not in result or encoder.ids(result[role]) != [known]):
            result[role] = sign
    return result


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text("utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{file}: broken JSON ({first_line(error)})") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: not a JSON object")
    return value


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text in it changed, but for roles."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): one if key == "role" else _each_text(one, change) for key, one in value.items()}
    return [_each_text(one, change) for one in value] if isinstance(value, list | tuple) else value


def _answers(messages: Sequence[Message]) -> list[int]:
    return [n for n, message in enumerate(messages) if message["role"] == "assistant"]


def _marked_segments(text: str) -> list[Segment]:
    """A text cut at its marks."""
    result, depth = [], 0
    for part in _MARKED.split(text):
        if part in (_OPEN, _CLOSE):
            depth += 1 if part == _OPEN else -1
        elif part:
            result.append(Segment(part, depth > 0))
    return result


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks what it encloses."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Macro) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _environment() -> Environment:
    """Jinja with the settings, filters and functions that Hugging Face's templates are written for. `strftime_now`
    isn't there: what is trained on must not depend on the day."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


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
