"""The OpenAI form of requests and answers, without the network.

Key idea: a request is checked as a whole before the model sees any of it: types, ranges, tokens against the context. A
field that would change the result and isn't supported is refused by name unless its value is the neutral one.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from megalite.config.errors import UserError
from megalite.data.chat_forms import ROLES
from megalite.inference.chat import Dialogue
from megalite.inference.generate import most_new_tokens
from megalite.inference.load import LoadedModel
from megalite.inference.options import GenerationOptions
from megalite.inference.text import TooLongError, encode_prompts

MAX_PROMPTS, MAX_MESSAGES = 16, 1024
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
BATCH_CONTEXTS = 4  # all prompts of a request with their answers: so many contexts together

# Fields that have no bearing on the text.
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
# Fields that would have, and the values of them that say nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_COMMON = {"model", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "max_tokens"}


class ApiError(Exception):
    """A request that isn't answered: an HTTP status and what OpenAI's error object holds."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Job:
    """A checked request. `prompts`: ids of each. `ends`: ids that end an answer."""

    chat: bool
    prompts: list[list[int]]
    options: GenerationOptions
    ends: frozenset[int]
    stop_strings: list[str]
    stream: bool
    include_usage: bool


def read_job(
    body: bytes, *, chat: bool, loaded: LoadedModel, defaults: GenerationOptions, dialogue: Dialogue | None
) -> Job:
    """Check the body of a request. `defaults`: what it leaves out. Raises an ApiError."""
    fields = _Fields(_parse(body))
    fields.check_names(_COMMON | ({"messages", "max_completion_tokens"} if chat else {"prompt"}))
    model = fields.take("model", str, None)
    if model is not None and model != loaded.name:
        raise ApiError(
            404, f"there is no model {model!r}; this server has {loaded.name!r}", param="model", code="model_not_found"
        )
    options = _options(fields, defaults)
    strings = _stop_strings(fields)
    stream = fields.take("stream", bool, False)
    stream_options = _Fields(fields.take("stream_options", dict, {}))
    stream_options.check_names({"include_usage", "include_obfuscation"})
    usage = stream_options.take("include_usage", bool, False)
    try:
        if chat:
            prompts, ends = _chat_prompt(fields, loaded, dialogue), dialogue.ends if dialogue else frozenset()
        else:
            prompts, ends = _prompts(fields, loaded), loaded.ends
    except UserError as error:
        code = "context_length_exceeded" if isinstance(error, TooLongError) else None
        raise ApiError(400, str(error), param="messages" if chat else "prompt", code=code) from None
    asked = fields.take("max_completion_tokens", int, None) if chat else None
    asked = fields.take("max_tokens", int, None) if asked is None else asked
    options = _with_room(options, asked, prompts, loaded)
    return Job(chat, prompts, options, ends, strings, stream, usage)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    for name, one in value.items():
        _check_unicode(name, one)
    return value


def _check_unicode(name: str, value: Any) -> None:
    """JSON can write half a character (a lone surrogate), which no tokenizer and no template takes."""
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.start + 1]
        raise ApiError(
            400, f"{ascii(name)[1:-1]} holds {half!a}, half of a surrogate pair: not valid UTF-8", param=name
        ) from None
    except RecursionError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


class _Fields:
    """An object whose values are taken by name and type; null stands for nothing given."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def check_names(self, known: set[str]) -> None:
        for name, value in self.values.items():
            if name in known or name in _IGNORED or value is None:
                continue
            if name not in _NEUTRAL:
                raise ApiError(400, f"unknown field {name!r}", param=name)
            if not any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in _NEUTRAL[name]):
                raise ApiError(400, f"{name} is not supported, other than {_NEUTRAL[name][0]!r}", param=name)

    def take(self, name: str, kind: type, default: Any) -> Any:
        """The value, of exactly this type; an integer serves as a float too."""
        value = self.values.get(name)
        if value is None:
            return default
        kinds = (int, float) if kind is float else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
            raise ApiError(400, f"{name} must be {_NAMES[kind]}, not {_show(value)}", param=name)
        return value


_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", dict: "an object"}


def _show(value: Any) -> str:
    return f"{json.dumps(value)[:50]}" if isinstance(value, str | int | float) else f"a {type(value).__name__}"


def _options(fields: _Fields, defaults: GenerationOptions) -> GenerationOptions:
    """All but the number of tokens. Without a seed each request has its own."""
    seed = fields.take("seed", int, None)
    given = {
        "temperature": fields.take("temperature", float, defaults.temperature),
        "top_p": fields.take("top_p", float, defaults.top_p),
        "top_k": fields.take("top_k", int, defaults.top_k),
    }
    top_p, top_k = given["top_p"], given["top_k"]
    _require(0 <= given["temperature"] <= 100, "temperature", "must be between 0 (greedy) and 100")
    _require(top_p is None or 0 < top_p <= 1, "top_p", "must be above 0 and at most 1")
    _require(top_k is None or top_k >= 1, "top_k", "must be at least 1")
    _require(seed is None or -(2**63) <= seed < 2**63, "seed", "must fit in 64 bits")
    return dataclasses.replace(defaults, seed=secrets.randbits(63) if seed is None else seed % 2**63, **given)


def _require(holds: bool, param: str, rule: str) -> None:
    if not holds:
        raise ApiError(400, f"{param} {rule}", param=param)


def _stop_strings(fields: _Fields) -> list[str]:
    value = fields.values.get("stop")
    strings = [] if value is None else [value] if isinstance(value, str) else value
    rule = f"must be a string or a list of at most {MAX_STOPS}, none empty or over {MAX_STOP_CHARACTERS} characters"
    _require(isinstance(strings, list) and len(strings) <= MAX_STOPS, "stop", rule)
    _require(all(isinstance(one, str) and 0 < len(one) <= MAX_STOP_CHARACTERS for one in strings), "stop", rule)
    return list(strings)


def _prompts(fields: _Fields, loaded: LoadedModel) -> list[list[int]]:
    """Text, ids, or a list of either."""
    value = fields.values.get("prompt")
    values: list[Any] = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    _require(len(values) <= MAX_PROMPTS, "prompt", f"must be at most {MAX_PROMPTS} prompts")
    if all(isinstance(one, str) for one in values):
        return encode_prompts(loaded.tokenizer, values, most=loaded.most_characters)
    rows = loaded.model.vocab_size
    for one in values:
        good = isinstance(one, list) and len(one) > 0 and all(type(i) is int for i in one)
        _require(good, "prompt", "must be a string, a list of token ids, or a list of either, none of them empty")
        _require(all(0 <= i < rows for i in one), "prompt", f"holds an id outside the vocabulary of {rows}")
        wrong = _first_unknown(one, loaded)
        _require(wrong is None, "prompt", f"holds the id {wrong}, which the tokenizer does not have")
    return values


def _first_unknown(ids: list[int], loaded: LoadedModel) -> int | None:
    """Of ids that have a row in the model, the first that the tokenizer doesn't know."""
    if loaded.unknown is None:
        return None
    found = torch.isin(torch.tensor(ids), loaded.unknown.cpu()).nonzero()
    return ids[int(found[0])] if len(found) else None


def _chat_prompt(fields: _Fields, loaded: LoadedModel, dialogue: Dialogue | None) -> list[list[int]]:
    if dialogue is None:
        raise UserError(
            "this model has no chat template: start the server with --chat-template, or use /v1/completions"
        )
    messages = fields.values.get("messages")
    good = isinstance(messages, list) and 0 < len(messages) <= MAX_MESSAGES
    _require(good, "messages", f"must be a list of 1 to {MAX_MESSAGES} messages")
    assert isinstance(messages, list)
    plain = [_message(one, number) for number, one in enumerate(messages)]
    opening = dialogue.opening if plain[0]["role"] != "system" else []
    return [dialogue.prompt([*opening, *plain], most=loaded.most_characters)]


def _message(value: Any, number: int) -> dict[str, str]:
    where = f"messages[{number}]"
    _require(isinstance(value, dict), where, "must be an object with role and content")
    role, content = value.get("role"), value.get("content")
    role = "system" if role == "developer" else role  # OpenAI's later name for it, which templates don't know
    _require(role in ROLES, f"{where}.role", f"must be one of {', '.join(ROLES)}, developer")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        _require(all(isinstance(text, str) for text in texts), f"{where}.content", "may hold parts of type text alone")
        content = "".join(texts)  # type: ignore[arg-type]
    _require(isinstance(content, str), f"{where}.content", "must be a string")
    extra = set(value) - {"role", "content", "name", "refusal"} - {key for key in value if not value[key]}
    _require(not extra, where, f"holds {', '.join(sorted(extra))}, which is not supported")
    return {"role": role, "content": content}


def _with_room(
    options: GenerationOptions, asked: int | None, prompts: list[list[int]], loaded: LoadedModel
) -> GenerationOptions:
    """`options` with the number of new tokens: what was asked for, or what of the default there is room for."""
    longest, context = max(map(len, prompts)), loaded.context
    rooms = [most_new_tokens(loaded.model, len(prompt)) for prompt in prompts]
    room = min((each for each in rooms if each is not None), default=context)
    _require(asked is None or asked >= 1, "max_tokens", "must be at least 1")
    wanted = 1 if asked is None else asked
    if longest + wanted > context:
        raise ApiError(
            400,
            f"the model's context is {context} tokens; the prompt has {longest} and max_tokens asks for {wanted}",
            param="max_tokens" if longest < context else "prompt",
            code="context_length_exceeded",
        )
    _require(
        asked is None or asked <= room,
        "max_tokens",
        f"must be at most {room} after such a prompt: beyond, all positions change",
    )
    new = asked or min(options.max_new_tokens, context - longest, room)
    total = len(prompts) * (longest + new)
    most = BATCH_CONTEXTS * context
    _require(total <= most, "prompt", f"comes with its answers to {total} tokens in all; at most {most}")
    return dataclasses.replace(options, max_new_tokens=new)


def usage(job: Job, new_tokens: int) -> dict[str, int]:
    """OpenAI's counts; the id that ends an answer isn't one of its tokens."""
    prompt = sum(map(len, job.prompts))
    return {"prompt_tokens": prompt, "completion_tokens": new_tokens, "total_tokens": prompt + new_tokens}


@dataclass(frozen=True)
class Frame:
    """What all objects of one answer have in common."""

    chat: bool
    number: str
    created: int
    model: str

    def whole(self, choices: list[tuple[str, str | None]], counts: dict[str, int]) -> dict[str, Any]:
        """The answer. `choices`: text and reason of its end."""
        listed = []
        for index, (text, finish) in enumerate(choices):
            body = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            listed.append({"index": index, **body, "logprobs": None, "finish_reason": finish})
        return {**self._head("chat.completion"), "choices": listed, "usage": counts}

    def first(self) -> dict[str, Any]:
        """What a stream of a chat begins with."""
        return self._chunk(0, {"delta": {"role": "assistant", "content": ""}}, None)

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """A part of an answer."""
        return self._chunk(index, {"delta": {"content": text}} if self.chat else {"text": text}, None)

    def last(self, index: int, finish: str | None) -> dict[str, Any]:
        """The end of an answer."""
        return self._chunk(index, {"delta": {}} if self.chat else {"text": ""}, finish)

    def counts(self, counts: dict[str, int]) -> dict[str, Any]:
        """What a stream ends with where `include_usage` asks for it."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": counts}

    def _chunk(self, index: int, body: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": index, **body, "logprobs": None, "finish_reason": finish}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}"
        return {
            "id": name,
            "object": kind if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
        }
