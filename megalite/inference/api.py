"""The OpenAI form of requests and answers, without the network.

Key idea: pydantic models say what a request may hold, and a request is checked as a whole before the model sees any of
it: types, ranges, tokens against the context and the memory. A field that would change the result and isn't supported
may hold its neutral value alone; an unknown one is refused by name.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from megalite.config.errors import UserError
from megalite.inference.chat import Dialogue
from megalite.inference.generate import room_after, virtual_tokens
from megalite.inference.load import LoadedModel
from megalite.inference.options import GenerationOptions
from megalite.inference.text import TooLongError, encode_prompts


class ApiError(Exception):
    """A request that isn't answered: an HTTP status and what OpenAI's error object holds."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Object(BaseModel):
    """A JSON object of a request. Null stands for nothing given."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @field_validator("prompt", "stop", "content", mode="wrap", check_fields=False)
    @classmethod
    def _name_all_forms(cls, value: Any, check: Callable[[Any], Any], info: ValidationInfo) -> Any:
        """One message in place of pydantic's, which has one for each form that a value may have."""
        try:
            return check(value)
        except ValidationError:
            forms = cls.model_fields[info.field_name or ""].description or ""
            raise PydanticCustomError("form", "must be {forms}", {"forms": forms}) from None


_Empty = Annotated[list[Any], Field(max_length=0)] | None
_Zero = Annotated[float, Field(ge=0, le=0)] | None
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_Several = Field(min_length=1, max_length=16)


class _Part(_Object):
    type: Literal["text"]
    text: str


class _Message(_Object):
    role: Literal["system", "developer", "user", "assistant"]  # a tool answers calls, which are not supported
    content: str | list[_Part] = Field(description="a string or a list of parts, all of type text")
    name: Any = None  # this and the next don't change the text
    refusal: Any = None
    tool_calls: _Empty = None  # these and the rest are not supported
    annotations: _Empty = None
    audio: None = None
    function_call: None = None

    def plain(self) -> dict[str, str]:
        """As templates take it. `developer` is OpenAI's later name for the system."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class _StreamOptions(_Object):
    include_usage: bool | None = None
    include_obfuscation: Any = None


class _Unsupported(_Object):
    """Fields that would change the text, which this server can't. Each may hold what says nothing."""

    n: Literal[1, None] = None
    best_of: Literal[1, None] = None
    echo: Literal[False, None] = None
    suffix: Literal["", None] = None
    logprobs: Literal[False, None] = None
    top_logprobs: Literal[0, None] = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    frequency_penalty: _Zero = None
    presence_penalty: _Zero = None
    tools: _Empty = None
    tool_choice: Literal["none", "auto", None] = None
    functions: _Empty = None
    function_call: Literal["none", "auto", None] = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    modalities: list[Literal["text"]] | None = None


class _Request(_Unsupported):
    """What both kinds of requests have in common."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = Field(
        None, description="a string or a list of at most 16 strings, each of 1 to 256 characters"
    )
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    # These don't change the text.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    parallel_tool_calls: Any = None


class CompletionRequest(_Request):
    """The body of a POST to /v1/completions."""

    prompt: str | _Ids | Annotated[list[str], _Several] | Annotated[list[_Ids], _Several] = Field(
        description="a string, a list of token ids, or a list of 1 to 16 of either, none of them empty"
    )


class ChatRequest(_Request):
    """The body of a POST to /v1/chat/completions."""

    messages: list[_Message] = Field(min_length=1, max_length=1024)
    max_completion_tokens: int | None = Field(None, ge=1)


@dataclass(frozen=True)
class Job:
    """A checked request and the form of its answer. `prompts`: ids of each. `ends`: ids that end an answer. `tokens`:
    how many the cache must have room for. `name`: of the model."""

    chat: bool
    prompts: list[list[int]]
    options: GenerationOptions
    ends: frozenset[int]
    stop_strings: list[str]
    stream: bool
    include_usage: bool
    tokens: int
    name: str
    number: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16))
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def answer(self, texts: list[str], finishes: list[str | None], new_tokens: int) -> dict[str, Any]:
        """The whole answer."""
        bodies = [{"message": {"role": "assistant", "content": one}} if self.chat else {"text": one} for one in texts]
        choices = [_choice(*each) for each in zip(range(len(texts)), bodies, finishes, strict=True)]
        return self._object("chat.completion", choices, usage=self.usage(new_tokens))

    def chunk(self, index: int, text: str, finish: str | None = None, **more: str) -> dict[str, Any]:
        """A part of a stream. `more`: beside the text of a chat."""
        body = {"delta": {"content": text, **more} if text or more else {}} if self.chat else {"text": text}
        return self._object("chat.completion.chunk", [_choice(index, body, finish)])

    def counts(self, new_tokens: int) -> dict[str, Any]:
        """What a stream ends with where `include_usage` asks for it."""
        return self._object("chat.completion.chunk", [], usage=self.usage(new_tokens))

    def usage(self, new_tokens: int) -> dict[str, int]:
        """OpenAI's counts; the id that ends an answer isn't one of its tokens."""
        prompt = sum(map(len, self.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": new_tokens, "total_tokens": prompt + new_tokens}

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        name, kind = (f"chatcmpl-{self.number}", kind) if self.chat else (f"cmpl-{self.number}", "text_completion")
        return {"id": name, "object": kind, "created": self.created, "model": self.name, "choices": choices, **more}


def _choice(index: int, body: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": index, **body, "logprobs": None, "finish_reason": finish}


def read_job(
    body: bytes, *, chat: bool, loaded: LoadedModel, defaults: GenerationOptions, dialogue: Dialogue | None, room: int
) -> Job:
    """Check the body of a request. `defaults`: what it leaves out. `room`: tokens that the server has memory for.
    Raises an ApiError."""
    try:
        request = (ChatRequest if chat else CompletionRequest).model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    if request.model not in (None, loaded.name):
        message = f"there is no model {request.model!r}; this server has {loaded.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    asked, ends = request.max_tokens, loaded.ends
    try:
        if isinstance(request, ChatRequest):
            prompts = _chat_prompt(request, loaded, dialogue)
            asked, ends = request.max_completion_tokens or asked, dialogue.ends if dialogue else ends
        else:
            prompts = _prompts(request, loaded)
    except UserError as error:
        code = "context_length_exceeded" if isinstance(error, TooLongError) else None
        raise ApiError(400, str(error), param="messages" if chat else "prompt", code=code) from None
    new = _new_tokens(asked, defaults.max_new_tokens, prompts, loaded, room)
    seed = secrets.randbits(63) if request.seed is None else request.seed % 2**63
    given = request.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)
    options = dataclasses.replace(defaults, max_new_tokens=new, seed=seed, **given)
    strings = [request.stop] if isinstance(request.stop, str) else request.stop or []
    usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    tokens = len(prompts) * (_cached(prompts, loaded) + new)
    return Job(chat, prompts, options, ends, strings, bool(request.stream), usage, tokens, loaded.name)


def _refusal(found: ValidationError) -> ApiError:
    """The first of what pydantic found."""
    error = found.errors(include_url=False)[0]
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {where!r}", param=where)
    reason = " is not supported" if where in _Unsupported.model_fields else ""
    return ApiError(400, f"{where}{reason}: {error['msg']}" if where else error["msg"], param=where or None)


def _prompts(request: CompletionRequest, loaded: LoadedModel) -> list[list[int]]:
    given: Any = request.prompt
    values = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if isinstance(values[0], str):
        return encode_prompts(loaded.tokenizer, values, most=loaded.most_characters)
    rows, unknown = loaded.model.vocab_size, loaded.unknown
    for ids in values:
        if max(ids) >= rows:
            raise UserError(f"prompt holds an id outside the vocabulary of {rows}")
        if unknown is not None and len(wrong := torch.isin(torch.tensor(ids), unknown.cpu()).nonzero()):
            raise UserError(f"prompt holds the id {ids[int(wrong[0])]}, which the tokenizer does not have")
    return list(values)


def _chat_prompt(request: ChatRequest, loaded: LoadedModel, dialogue: Dialogue | None) -> list[list[int]]:
    if dialogue is None:
        raise UserError(
            "this model has no chat template: start the server with --chat-template, or use /v1/completions"
        )
    messages = [one.plain() for one in request.messages]
    opening = dialogue.opening if messages[0]["role"] != "system" else []
    return [dialogue.prompt([*opening, *messages], most=loaded.most_characters)]


def _cached(prompts: list[list[int]], loaded: LoadedModel) -> int:
    """Tokens of each prompt in the cache, padding included."""
    return virtual_tokens(loaded.model) + max(map(len, prompts))


def _new_tokens(asked: int | None, default: int, prompts: list[list[int]], loaded: LoadedModel, room: int) -> int:
    """How many may follow each prompt: what was asked for, or what of the default there is room for."""
    longest, context, too_long = max(map(len, prompts)), loaded.context, "context_length_exceeded"
    positions, reason = min(room_after(loaded.model, len(prompt)) for prompt in prompts)
    memory = f"the server's memory (--serve-memory) holds {room} tokens for all prompts and their answers"
    limits = [
        (context - longest, f"the model's context is {context} tokens and the prompt has {longest}", too_long),
        (min(positions, context), f"the text would be {reason}", too_long),
        (room // len(prompts) - _cached(prompts, loaded), memory, "memory_exceeded"),
    ]
    most, reason, code = min(limits, key=lambda limit: limit[0])
    if most < (asked or 1):
        param = "max_tokens" if most > 0 else "messages or prompt"
        rest = f"max_tokens may be at most {most}" if most > 0 else "there is no room for an answer"
        raise ApiError(400, f"{reason}: {rest}", param=param, code=code)
    return asked or int(min(default, most))
