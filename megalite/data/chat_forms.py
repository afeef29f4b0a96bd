"""Converts the formats in which files hold conversations and answers to one: messages with role and content.

The key idea: every key of a message is read, means nothing because it is null or empty, or is refused. A key that was
ignored would train something else than its writer meant.

| form | keys of a line |
|---|---|
| OpenAI | `messages` of `role` and `content`; perhaps `tools` |
| ShareGPT | `conversations` of `from` and `value`; perhaps `system`, `tools` |
| Alpaca | `instruction`, perhaps `input`, and `output`; perhaps `system` |
| a pair | `prompt` and `completion`: text without a template |
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

from megalite.data.chat_template import ChatTemplate
from megalite.data.jsonl import Line
from megalite.data.text_input import excerpt

_ROLES = ("system", "user", "assistant", "tool")
FORMS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "instruction and output": ("instruction", "output"),
    "prompt and completion": ("prompt", "completion"),
}
PAIR = "prompt and completion"
# Names and numbers of calls say which message answers which: a template may do without.
_KEYS = ("role", "content", "name", "tool_call_id", "weight", "train")
_OF_MESSAGES = ("weight", "train", "loss_mask", "chat_template_kwargs")  # belong to a message, not to a line
_OUT_OF_LOSS = 'to keep an answer out of the loss, put "weight": 0 or "train": false in its message'
_SENDERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """messages: of role and content. trained: the numbers of those whose answers count."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    trained: list[int]


def form_of(line: Line) -> str:
    """Which of FORMS a line has. Raises UserError where it has none or several."""
    for key in _OF_MESSAGES:
        if line.value.get(key) is not None:
            raise line.error(f"the key {key} is not supported: {_OUT_OF_LOSS}")
    found = [form for form, keys in FORMS.items() if line.value.keys() >= set(keys)]
    if len(found) == 1:
        return found[0]
    if found:
        raise line.error(f"it has {' and also '.join(found)}: keep only one of these forms")
    hint = "; labels are for --task classification" if "label" in line.value else ""
    raise line.error(
        f"messages, conversations, instruction and output, or prompt and completion are needed; the line's keys: "
        f"{line.keys}{hint}"
    )


def conversation_of(line: Line, form: str, template: ChatTemplate) -> Conversation | None:
    """The conversation of a line of one of the forms other than PAIR. None for Alpaca's lines without an output, of
    which its published files have some.

    template: what messages and tools hold must mean something to it. Raises UserError with file and line.
    """
    if form == "messages":
        messages = _list_of(line, "messages", "role and content")
    elif form == "conversations":
        messages = [_message_from(line, turn) for turn in _list_of(line, "conversations", "from and value")]
    elif not line.text("output").strip():
        return None
    else:
        messages = _exchange(line)
    tools = _tools(line)
    if tools and not template.mentions("tools"):
        raise line.error(f"it has tools, and the chat template {template.name} doesn't use them: remove them")
    checked = [_checked(line, number, message, template) for number, message in enumerate(messages, start=1)]
    if line.value.get("system"):
        if checked[0][0]["role"] == "system":
            raise line.error("it has both the key system and a first message with the role system: remove one")
        checked.insert(0, ({"role": "system", "content": line.text("system")}, False))
    trained = [n for n, (message, counts) in enumerate(checked) if message["role"] == "assistant" and counts]
    return Conversation([message for message, _ in checked], tools, trained)


def _tools(line: Line) -> list[Any] | None:
    """A list of them, or one as JSON in a string, as some files of ShareGPT's form have it."""
    tools = line.value.get("tools") or None
    if isinstance(tools, str):
        with contextlib.suppress(ValueError):
            tools = json.loads(tools) or None
    if tools is not None and not isinstance(tools, list):
        raise line.error(f"tools must be a list, not {excerpt(tools)}")
    return tools


def pair_of(line: Line) -> tuple[str, str]:
    """Prompt and completion of a line that has both."""
    for key in ("system", "tools"):
        if line.value.get(key):
            raise line.error(f"it has {key} beside prompt and completion, which use no chat template: use messages")
    completion = line.text("completion")
    if not completion.strip():
        raise line.error("the completion is empty")
    return line.text("prompt"), completion


def _list_of(line: Line, key: str, keys: str) -> list[Any]:
    value = line.value[key]
    if not isinstance(value, list) or not value:
        raise line.error(f"{key} must be a list of objects with {keys}, not {excerpt(value)}")
    return value


def _message_from(line: Line, turn: Any) -> Any:
    """A message of one of ShareGPT's turns. Some files have role and content there; those stay as they are."""
    if not isinstance(turn, dict) or "role" in turn:
        return turn
    sender = turn.get("from")
    if not isinstance(sender, str) or sender not in _SENDERS:
        raise line.error(f"conversations has a turn from {excerpt(sender)}; known are {', '.join(_SENDERS)}")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": _SENDERS[sender], "content": turn.get("value"), **rest}


def _exchange(line: Line) -> list[Any]:
    """Question and answer of an Alpaca line; its input stands below the instruction."""
    if line.value.get("history"):
        raise line.error("the key history is not supported: write the earlier turns as messages with role and content")
    question = line.text("instruction")
    if line.value.get("input"):
        question += "\n" + line.text("input")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": line.text("output")}]


def _checked(line: Line, number: int, message: Any, template: ChatTemplate) -> tuple[dict[str, Any], bool]:
    """A message without what is said of its training, and whether it counts."""
    if not isinstance(message, dict):
        raise line.error(f"message {number} must be an object with role and content, not {excerpt(message)}")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        problem = f"has the role {excerpt(role)}" if "role" in message else "has no role"
        raise line.error(f"message {number} {problem}; known are {', '.join(_ROLES)}")
    for key, value in message.items():
        if key not in _KEYS and value not in (None, "", [], {}) and not template.reads(key):
            raise line.error(
                f"message {number} has the key {excerpt(key)}, which is not supported; known are {', '.join(_KEYS)}, "
                f"and what the chat template {template.name} reads; {_OUT_OF_LOSS}"
            )
    counts = _counts(line, number, message)
    calls = role == "assistant" and message.get("tool_calls")
    if not (calls and content is None) and not isinstance(content, str):
        raise line.error(f"the content of message {number} ({role}) must be a string, not {excerpt(content)}")
    if role == "assistant" and not calls and not (content or "").strip():
        raise line.error(f"message {number} is an empty answer")
    return {key: value for key, value in message.items() if key not in ("weight", "train")}, counts


def _counts(line: Line, number: int, message: dict[str, Any]) -> bool:
    """What `weight` (0 or 1) and `train` (true or false) say; True where neither is there."""
    said = {key: message[key] for key in ("weight", "train") if message.get(key) is not None}
    for key, value in said.items():
        if value not in (0, 1):  # true and false are 1 and 0
            raise line.error(f"the {key} of message {number} must be 0 or 1, or true or false, not {excerpt(value)}")
        if value and message["role"] != "assistant":
            raise line.error(
                f"message {number} has the role {message['role']} and {key} {excerpt(value)}: only an assistant's "
                "messages are trained"
            )
    if len({bool(value) for value in said.values()}) > 1:
        raise line.error(f"weight and train of message {number} contradict each other")
    return all(said.values())
