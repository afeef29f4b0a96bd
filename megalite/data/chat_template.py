"""Conversations as text: a tokenizer's own chat template, one from a file, or a built-in one.

A chat template is a Jinja program that writes a list of messages as text. It runs in Jinja's sandbox, with the names
and filters that Hugging Face's templates expect. (Jinja is there wherever torch is, which depends on it.)

The key idea: a template doesn't say which text is an answer, but it can be asked. What it writes for the messages
before an answer, ready for the model to begin, is where the answer starts; what it writes for those up to the answer
is where it ends. Both are asked at each answer's own turn, since a template may write a turn differently once others
follow (many drop the reasoning of earlier answers). Then that answer is the last of a sample, and a later one begins
another, with the context that the template gives it. A template that marks answers itself with `{% generation %}` is
taken at its word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from megalite.config.errors import FlagError, UserError
from megalite.data.jinja_environment import CLOSE, OPEN, keys_and_variables, template_environment, with_parsed_calls
from megalite.data.segments import BOS_SIGN, EOD_SIGN, TextEncoder, TextSegment, unguarded
from megalite.data.tokenizer_base import Tokenizer, first_line, read_file
from megalite.data.tokenizer_json import ROLES, json_object

CHATML = "chatml"  # the name of the built-in template

Message = Mapping[str, Any]
_MARKED = re.compile(f"([{OPEN}{CLOSE}])")
_LONGEST_END = 64  # characters of the token that ends a turn
_PROBE = "answer0417"  # content that no template writes itself
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

# OpenAI's ChatML; where the tokenizer has no <|im_end|>, the end of a turn is its EOD.
_CHATML_SOURCE = """{{ bos_token }}
{%- for message in messages %}
{%- if message.tool_calls %}{{ raise_exception("this template doesn't support tool_calls") }}{% endif %}
{{- "<|im_start|>" + message.role + "\\n" + message.content + end_of_turn + "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}
"""


class UnstableTemplateError(UserError):
    """The template doesn't continue its own prompt with the answer."""


class ChatTemplate:
    """Writes conversations. `name`: for messages. `variables`: what the program sees besides the conversation, such as
    `eos_token`. `protect`: see `TextEncoder.protect`; what messages and tools say is written through it. `stops`: see
    `TextEncoder.stops`; an answer that doesn't end so gets an EOD.

    A message is an object with `role` and `content`, and whatever else the template knows (`tool_calls`, ...).
    """

    def __init__(
        self,
        source: str,
        name: str,
        variables: Mapping[str, str],
        protect: Callable[[str], str] = str,
        stops: Callable[[str], bool] = bool,
    ):
        """Raises UserError where `source` isn't a template."""
        self.name, self.source, self.variables, self._protect, self._stops = name, source, variables, protect, stops
        self.marks_answers = _GENERATION_TAG.search(source) is not None
        try:
            self._template = template_environment().from_string(source, globals=dict(variables))
        except TemplateSyntaxError as error:
            raise UserError(f"the chat template {name}, line {error.lineno}: {error.message}") from None
        self._keys, self._read = keys_and_variables(source)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation, with `add_generation_prompt` ready for the assistant to begin.

        Raises UserError where the template refuses the conversation, in its own words.
        """
        return unguarded(_MARKED.sub("", self._render(messages, tools, add_generation_prompt)))

    def reads(self, key: str) -> bool:
        """Whether the program takes this key of a message, or of some object: `.key`, `['key']` or `get('key')`."""
        return key in self._keys

    def mentions(self, variable: str) -> bool:
        """Whether the program reads this variable."""
        return variable in self._read

    def marks_of_turns(self, tokens: Collection[str]) -> set[str]:
        """Those of some tokens that frame a message: it could forge a turn with them. They are what the template writes
        for plain messages as well as for the next answer's beginning, and ends of text; one of both alone may be
        content (`<think>`). So is what has no letter: Yi has tokens for a line break and for each digit."""
        question, answer = {"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}
        try:
            conversation = self.render([question, answer, question])
            prompt = self.render([question], add_generation_prompt=True)
        except UserError:  # it refuses even the plainest conversation
            conversation = prompt = ""
        ends = self.variables.values()
        written = {token for token in tokens if token in conversation and token in prompt}
        return {token for token in tokens if token in ends or (token in written and any(map(str.isalpha, token)))}

    def samples(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, trained: Collection[int] | None = None
    ) -> list[list[TextSegment]]:
        """A conversation as training takes it: samples, each the text up to an answer, cut into context and answers.

        One sample with all answers where the template only ever adds to what it wrote. An answer is the last of its
        sample where the template writes it differently later, or writes no end of turn (EOD then ends it); the next
        sample begins from the first message, as the template writes it at the next answer's turn, and its earlier
        answers are context.

        `trained`: numbers of the messages whose answers count; None: all. Raises UserError where there is no such
        answer or the template refuses, UnstableTemplateError where it isn't clear which text is an answer.
        """
        answers = _answers(messages)
        chosen = answers if trained is None else [n for n in answers if n in trained]
        if not chosen:
            raise UserError("no assistant turn is trained" if answers else "there is no assistant turn")
        if self.marks_answers:
            return [self._marked(messages, tools, answers, chosen)]
        samples, _ = self._turns(messages, tools, answers)
        flags = iter([n in chosen for n in answers])
        marked = [[each._replace(counted=each.counted and next(flags)) for each in sample] for sample in samples]
        return [sample for sample in marked if any(segment.counted for segment in sample)]

    def segments(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> list[TextSegment]:
        """The sample that ends with the last answer, see `samples`."""
        return self.samples(messages, tools=tools)[-1]

    def prompt_segments(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> list[TextSegment]:
        """The text after which the model answers, cut as `samples` cuts what comes before an answer."""
        whole = self._render(messages, tools, True)
        if self.marks_answers:
            return _marked_segments(whole)
        try:
            history, known = self._turns(messages, tools, _answers(messages))
        except UnstableTemplateError:
            return [TextSegment(whole, False)]
        if known is None or not whole.startswith(known):
            return [TextSegment(whole, False)]
        place = sum(len(segment.text) for segment in history[-1])
        return [*history[-1], TextSegment(whole[place:], False)]

    def _turns(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, answers: Sequence[int]
    ) -> tuple[list[list[TextSegment]], str | None]:
        """Samples with all answers; and the text that a prompt must begin with for its answer to go into the last of
        them, None where none can."""
        samples: list[list[TextSegment]] = []
        known, place = None, 0
        for number, n in enumerate(answers, start=1):
            before = self._before(messages[:n], tools)
            until = self._render(messages[: n + 1], tools, False)
            if not until.startswith(before):
                raise UnstableTemplateError(
                    f"the chat template {self.name} doesn't write answer {number} as the continuation of its own "
                    "prompt for it, so it isn't clear which text the answer is. Give --chat-template "
                    f"{CHATML}, or a template file that marks answers with {{% generation %}}"
                )
            if known is None or not before.startswith(known):
                samples.append([])
                place = 0
            answer = until[len(before) :].rstrip()  # nobody generates the blanks after an end of turn
            known = until if self._is_closed(answer) else None
            answer += "" if known is not None else EOD_SIGN
            samples[-1] += [TextSegment(before[place:], False), TextSegment(answer, True)]
            place = len(before) + len(answer)
        return samples, known

    def _before(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        """The prompt for an answer."""
        try:
            return self._render(messages, tools, True)
        except UserError:
            if messages:
                raise
            raise UserError(
                f"it begins with an answer, which the chat template {self.name} refuses: begin with a "
                "system or user message"
            ) from None

    def _marked(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, answers: Sequence[int], chosen: Sequence[int]
    ) -> list[TextSegment]:
        """The one sample of a template that marks answers."""
        result = _marked_segments(self._render(messages[: answers[-1] + 1], tools, False))
        marked = [place for place, segment in enumerate(result) if segment.counted]
        if not marked:
            raise UserError(f"the chat template {self.name} marks none of its text with {{% generation %}}")
        if len(chosen) < len(answers):
            if len(marked) != len(answers):
                raise UserError(
                    f"some of its {len(answers)} answers aren't trained, but the chat template {self.name} marks "
                    f"{len(marked)} pieces with {{% generation %}}, so it isn't clear which piece is which answer"
                )
            kept = {place for place, n in zip(marked, answers, strict=True) if n in chosen}
            result = [segment._replace(counted=place in kept) for place, segment in enumerate(result)]
        while not result[-1].counted:
            result.pop()
        return result

    def _is_closed(self, answer: str) -> bool:
        """Whether an answer's text ends with an end of turn at which generation can stop."""
        if self._end_of_turn is None:
            return self._stops(answer[-_LONGEST_END:])
        ends = (self._end_of_turn, self.variables.get("eos_token", "").lower(), EOD_SIGN)
        return any(end and answer.lower().endswith(end) and self._stops(answer[-len(end) :]) for end in ends)

    @cached_property
    def _end_of_turn(self) -> str | None:
        """What the template writes after an answer's content, in small letters, without blanks around. None where it
        wants another form of conversation, and so is one of those that write much."""
        turns = [{"role": "user", "content": "0"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self._render(turns, None, False)
        except UserError:
            return None
        return text.lower().rpartition(_PROBE)[2].strip()  # a template may write the content in capitals

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
                messages=[with_parsed_calls(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError as error:
            raise UserError(f"the chat template {self.name} refuses it: {first_line(error)}") from None
        except Exception as error:  # a program of unknown origin may fail in any way
            raise UserError(f"the chat template {self.name} fails on it: {first_line(error)}") from None


class Chat:
    """A chat template and a tokenizer: conversations as ids."""

    def __init__(self, template: ChatTemplate, encoder: TextEncoder):
        self.template, self.encoder = template, encoder

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> list[int]:
        """The ids after which the model answers, as training shows them."""
        return self.ids(self.template.prompt_segments(messages, tools=tools))

    def ids(self, segments: Sequence[TextSegment]) -> list[int]:
        """The ids of what the template writes."""
        return [i for piece in self.encoder.encode(segments) for i in piece.ids]

    def end_of_turn(self) -> int:
        """The id that ends an answer: generation stops there."""
        messages = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}]
        last = self.encoder.encode(self.template.segments(messages))[-1].ids[-1]
        return last if self.encoder.tokenizer.is_control(last) else self.encoder.ids(EOD_SIGN)[0]


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
        return _chat(_CHATML_SOURCE, CHATML, _built_in_tokens(encoder), tokenizer)
    found = _own(folder) if choice is None else _from_file(Path(choice))
    if found is None:
        where = choice or (str(folder) if folder is not None else "this tokenizer")
        raise FlagError(
            f"{where} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): give "
            f"--chat-template {CHATML} or a file"
        )
    source, name = found
    return _chat(source, name, _special_tokens(folder, encoder), tokenizer)


def _chat(source: str, name: str, variables: Mapping[str, str], tokenizer: Tokenizer) -> Chat:
    """For this chat, tokens that mark turns are special ones, whatever the tokenizer's files call them."""
    marks = ChatTemplate(source, name, variables).marks_of_turns(tokenizer.added.keys() - tokenizer.special)
    encoder = TextEncoder(tokenizer.with_special(marks) if marks else tokenizer)
    return Chat(ChatTemplate(source, name, variables, encoder.protect, encoder.stops), encoder)


def _built_in_tokens(encoder: TextEncoder) -> dict[str, str]:
    tokenizer = encoder.tokenizer
    begins = tokenizer.bos is not None and encoder.prefix == [tokenizer.bos]
    one_id = len(encoder.ids("<|im_end|>")) == 1
    return {"bos_token": BOS_SIGN if begins else "", "end_of_turn": "<|im_end|>" if one_id else EOD_SIGN}


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
        template = json_object(file).get("chat_template")
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
        values = {} if folder is None else json_object(folder / name)
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


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text in it changed, but for roles."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): one if key == "role" else _each_text(one, change) for key, one in value.items()}
    return [_each_text(one, change) for one in value] if isinstance(value, list | tuple) else value


def _answers(messages: Sequence[Message]) -> list[int]:
    return [n for n, message in enumerate(messages) if message["role"] == "assistant"]


def _marked_segments(text: str) -> list[TextSegment]:
    """A text cut at its marks."""
    result, depth = [], 0
    for part in _MARKED.split(text):
        if part in (OPEN, CLOSE):
            depth += 1 if part == OPEN else -1
        elif part:
            result.append(TextSegment(part, depth > 0))
    return result
