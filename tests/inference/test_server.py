"""The server as its clients see it: OpenAI's own client, plain HTTP, bounds, and no end by any request."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from torch import Tensor

from megalite.config.errors import UserError
from megalite.inference import server as server_module
from megalite.inference import service as service_module
from megalite.inference.chat import open_dialogue
from megalite.inference.generate import GenerationCache, PaddedBatch
from megalite.inference.load import LoadedModel, load_huggingface_for_generation
from megalite.inference.options import GenerationOptions
from megalite.inference.server import MAX_CONNECTIONS, Server, listen
from megalite.inference.service import MAX_READING, MAX_RUNNING, Service
from tests.inference.checkpoints import generate, save_hf

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "Hello"}]


class Client:
    """Plain HTTP to one server, and OpenAI's client."""

    def __init__(self, service: Service, loaded: LoadedModel, port: int):
        self.service, self.loaded, self.port = service, loaded, port
        url = f"http://127.0.0.1:{port}/v1"
        self.official = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if answer.headers["Content-Type"] == "application/json" else text
        finally:
            connection.close()

    def post(self, path: str, **fields: Any) -> dict[str, Any]:
        status, value = self.send("POST", path, json.dumps(fields).encode())
        assert status == 200, value
        return dict(value)

    def complete(self, prompt: str, count: int) -> str:
        """The official client's completion."""
        return self.official.completions.create(model="tiny", prompt=prompt, max_tokens=count).choices[0].text

    def greedy(self, prompt: str, count: int) -> tuple[list[int], str]:
        """What the model writes, without the server."""
        tokenizer = self.loaded.tokenizer
        ids = tokenizer.tokenize(prompt)
        options = GenerationOptions(max_new_tokens=count)
        (new,) = generate(self.loaded.model, [ids], options, stop=self.loaded.ends, unknown=self.loaded.unknown)
        return new, tokenizer.detokenize([*ids, *new])[len(prompt) :]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_hf(tmp_path_factory.mktemp("server") / "tiny")
    return load_huggingface_for_generation(str(folder), given={"layout.threads_per_rank": 1})


@pytest.fixture(scope="module")
def client(loaded: LoadedModel) -> Iterator[Client]:
    with serving(loaded) as client:
        yield client


@contextlib.contextmanager
def serving(loaded: LoadedModel, *, memory: int = 1 << 30, send_buffer: int | None = None) -> Iterator[Client]:
    """A client of a server that runs in a thread."""
    dialogue = open_dialogue(loaded, None) if loaded.name == "tiny" else None
    service = Service(loaded, GenerationOptions(max_new_tokens=24), dialogue, memory)
    server, listener = Server(service), listen(0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield Client(service, loaded, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)
        service.close()
        assert not thread.is_alive()


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_it_says_how_it_is_and_what_it_has(client: Client) -> None:
    assert client.send("GET", "/health") == (200, {"status": "ok"})
    assert [model.id for model in client.official.models.list()] == ["tiny"]
    assert client.official.models.retrieve("tiny").owned_by == "megalite"
    paths = client.send("GET", "/")[1]
    assert all(client.send("GET", path)[0] == 200 for path in paths["GET"])
    assert (paths["model"], paths["POST"]) == ("tiny", [COMPLETIONS, CHAT])


def test_a_completion_is_the_greedy_continuation_with_its_counts(client: Client) -> None:
    tokens, text = client.greedy("The quick", 10)
    answer = client.official.completions.create(model="tiny", prompt="The quick", max_tokens=10)
    (choice,) = answer.choices
    reason = "length" if len(tokens) == 10 else "stop"
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (text, reason, 0, None)
    prompt = len(client.loaded.tokenizer.tokenize("The quick"))
    counts = {"prompt_tokens": prompt, "completion_tokens": len(tokens), "total_tokens": prompt + len(tokens)}
    assert answer.usage is not None and answer.usage.model_dump(exclude_none=True) == counts


def test_answers_have_all_that_openai_s_types_require(client: Client) -> None:
    how: dict[str, Any] = {"max_tokens": 2, "messages": HELLO}
    openai.types.chat.ChatCompletion.model_validate(client.post(CHAT, **how), strict=True)
    openai.types.Completion.model_validate(client.post(COMPLETIONS, prompt="a", max_tokens=2), strict=True)
    for chunk in client.official.chat.completions.create(model="tiny", stream=True, **how):
        openai.types.chat.ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)


def test_several_prompts_and_ids_are_answered_in_order(client: Client) -> None:
    prompts = ["The quick", "def add(", "今天"]
    ids = [client.loaded.tokenizer.tokenize(prompt) for prompt in prompts]
    expected = [client.greedy(prompt, 6)[1] for prompt in prompts]
    for given in (prompts, ids):
        assert [one["text"] for one in client.post(COMPLETIONS, prompt=given, max_tokens=6)["choices"]] == expected
    assert client.post(COMPLETIONS, prompt=ids[0], max_tokens=6)["choices"][0]["text"] == expected[0]


def test_a_stream_joined_is_the_whole_answer(client: Client) -> None:
    how: dict[str, Any] = {"model": "tiny", "temperature": 2.0, "seed": 5, "max_tokens": 20}
    flow: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    completions, chats = client.official.completions, client.official.chat.completions
    whole = completions.create(prompt=["今天", "The"], **how)
    *chunks, last = completions.create(prompt=["今天", "The"], **how, **flow)
    assert (last.usage, last.choices) == (whole.usage, [])
    for choice in whole.choices:
        pieces = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [choice.finish_reason]
    answer = chats.create(messages=HELLO, **how)
    *parts, end = chats.create(messages=HELLO, **how, **flow)
    assert (end.usage, parts[0].choices[0].delta.role) == (answer.usage, "assistant")
    joined = "".join(part.choices[0].delta.content or "" for part in parts)
    assert (joined, parts[-1].choices[0].finish_reason) == (
        answer.choices[0].message.content,
        answer.choices[0].finish_reason,
    )


def test_the_seed_decides_and_without_one_answers_differ(client: Client) -> None:
    def answer(**fields: Any) -> str:
        how = {"messages": HELLO, "temperature": 2.0, **fields}
        return str(client.post(CHAT, **how)["choices"][0]["message"]["content"])

    assert answer(seed=1) == answer(seed=1) != answer(seed=2)
    assert len({answer() for _ in range(3)}) == 3
    assert answer(seed=1, top_p=1e-9) == answer(temperature=0)


def test_an_answer_ends_before_a_stop_string(client: Client) -> None:
    _, text = client.greedy("The quick", 24)
    for stop in (text[3:6], ["nowhere at all", text[3:6]]):
        (choice,) = client.post(COMPLETIONS, prompt="The quick", stop=stop)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text[: text.index(text[3:6])], "stop")


def test_messages_in_parts_are_joined(client: Client) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    answers = [client.post(CHAT, messages=one, max_completion_tokens=8)["choices"] for one in (HELLO, parts)]
    assert answers[0] == answers[1]


# What is wrong with the body of a completion, and of a chat.
BAD_COMPLETIONS: list[tuple[bytes | dict[str, Any], str]] = [
    (b"{", "Invalid JSON"),
    (b"[" * 100_000, "Invalid JSON"),
    (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", ""),
    (b'{"prompt": "a", "temperature": NaN}', "temperature: Input should be a finite number"),
    (b"[]", "should be an object"),
    ({}, "prompt: Field required"),
    ({"prompt": []}, "none of them empty"),
    ({"prompt": [1, "a"]}, "prompt: must be a string"),
    ({"prompt": [448]}, "outside the vocabulary"),
    ({"prompt": [1, 430]}, "prompt holds the id 430, which the tokenizer does not have"),
    ({"prompt": [[1], [404]]}, "prompt holds the id 404"),
    ({"prompt": [True]}, "prompt: must be a string"),
    ({"prompt": ["a"] * 17}, "a list of 1 to 16 of either"),
    ({"prompt": "\ud800"}, "Invalid JSON"),
    (b'{"prompt": "a\xed\xa0\x80"}', "Invalid JSON"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    ({"prompt": "a", "max_tokens": "9"}, "max_tokens: Input should be a valid integer"),
    ({"prompt": "a", "max_tokens": 10**30}, "context is 256"),
    ({"prompt": "a b c d " * 100}, "context is 256"),
    ({"prompt": "a", "temperature": -1}, "temperature: Input should be greater than or equal to 0"),
    ({"prompt": "a", "top_p": 0}, "top_p: Input should be greater than 0"),
    ({"prompt": "a", "seed": 2**70}, "seed: Input should be less than"),
    ({"prompt": "a", "stop": ""}, "stop: must be a string or a list"),
    ({"prompt": "a", "stop": [1]}, "stop: must be a string or a list"),
    ({"prompt": "a", "n": 2}, "n is not supported"),
    ({"prompt": "a", "logprobs": 5}, "logprobs is not supported"),
    ({"prompt": "a", "temprature": 1}, "unknown field 'temprature'"),
    ({"prompt": "a", "stream": "yes"}, "stream: Input should be a valid boolean"),
]
BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages: List should have at least 1 item"),
    (["a"], "messages.0: Input should be an object"),
    ([{"role": "user"}], "messages.0.content: Field required"),
    ([{"role": 1, "content": "a"}], "role: Input should be 'system', 'developer', 'user' or 'assistant'"),
    ([{"role": "tool", "content": "a", "tool_call_id": "b"}], "role: Input should be"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "parts, all of type text"),
    ([{"role": "assistant", "content": "a", "tool_calls": [{}]}], "tool_calls"),
    ([{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}], "Invalid JSON"),
]
BAD = [
    *((COMPLETIONS, body, 400, message) for body, message in BAD_COMPLETIONS),
    *((CHAT, {"messages": messages}, 400, message) for messages, message in BAD_MESSAGES),
    (CHAT, {}, 400, "messages: Field required"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools is not supported"),
    (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "no model 'other'"),
    ("/v1/embeddings", {}, 404, "there is no /v1/embeddings"),
    ("/health", {}, 405, "takes GET"),
    ("/", {}, 405, "takes GET"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), BAD)
def test_a_bad_request_is_told_in_openai_s_form(
    client: Client, path: str, body: bytes | dict[str, Any], status: int, message: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    found, value = client.send("POST", path, content)
    assert found == status
    assert set(value) == {"error"}
    assert set(value["error"]) == {"message", "type", "param", "code"}
    assert message in value["error"]["message"]
    assert value["error"]["type"] == "invalid_request_error"


def test_fields_that_say_nothing_are_accepted(client: Client) -> None:
    empty: dict[str, Any] = {"tools": [], "functions": [], "logit_bias": {}, "response_format": {"type": "text"}}
    zero: dict[str, Any] = {
        "n": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logprobs": False,
        "top_logprobs": 0,
    }
    ignored: dict[str, Any] = {"user": "u", "metadata": {"a": "b"}, "seed": None, "stop": None}
    said = [{"role": "user", "content": "Hello", "name": "n", "tool_calls": [], "refusal": None}]
    expected = client.post(CHAT, messages=HELLO, max_tokens=4)["choices"]
    assert client.post(CHAT, messages=said, max_tokens=4, **empty, **zero, **ignored)["choices"] == expected


def raw(client: Client, content: bytes) -> bytes:
    """All that the server answers to some bytes of a client that then sends no more."""
    with socket.create_connection(("127.0.0.1", client.port), timeout=30) as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "message"),
    [
        ("GET", COMPLETIONS, {}, 405, f"{COMPLETIONS} takes POST"),
        ("GET", "/nothing", {}, 404, "there is no /nothing"),
        ("BREW", "/health", {}, 405, "/health takes GET"),
        ("GET", "/health", {"Host": "evil.example:80"}, 403, "Host: this server only answers requests to 127.0.0.1"),
        ("GET", "/health", {"Host": "localhost.example"}, 403, "Host: "),
        ("GET", "/health", {"Host": "[broken"}, 403, "Host: "),
        ("POST", COMPLETIONS, {"Origin": "https://evil.example"}, 403, "Origin: this server only answers web pages of"),
        ("POST", COMPLETIONS, {"Origin": "http://127.0.0.1.evil.example"}, 403, "Origin: "),
        ("POST", COMPLETIONS, {"Origin": "null"}, 403, "Origin: "),
        ("POST", "/nothing", {"Origin": "null"}, 403, "Origin: "),
    ],
)
def test_what_is_not_for_this_server_is_refused_with_a_json_error(
    client: Client, method: str, path: str, headers: dict[str, str], status: int, message: str
) -> None:
    found, value = client.send(method, path, b'{"prompt": "a"}', **headers)
    assert (found, value["error"]["message"][: len(message)]) == (status, message)


def test_local_names_and_pages_are_answered(client: Client) -> None:
    for headers in ({"Host": "LOCALHOST:80"}, {"Origin": "http://localhost:3000"}, {"Origin": "http://127.0.0.1"}):
        assert client.send("GET", "/health", **headers)[0] == 200


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_client_that_has_said_all_and_still_reads_is_answered(
    client: Client, monkeypatch: pytest.MonkeyPatch, version: bytes, stream: bytes
) -> None:
    monkeypatch.setattr(server_module, "PROBE_SECONDS", 0.01)
    body = b'{"prompt":"The quick","max_tokens":100,"stream":' + stream + b"}"
    head = b"POST /v1/completions HTTP/%s\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (version, len(body))
    answer, interim = raw(client, head + body), b"HTTP/1.1 100 Continue\r\n\r\n"
    if version == b"1.0" or stream == b"false":  # a stream may begin before the first probe, or after it
        assert (interim in answer) == (version == b"1.1")
    assert answer.replace(interim, b"").startswith(b"HTTP/1.1 200 OK")
    assert (b"data: [DONE]" if stream == b"true" else b'"total_tokens"') in answer


def test_a_body_beyond_the_bound_is_refused(client: Client) -> None:
    most = client.service.max_body
    status, value = client.send("POST", COMPLETIONS, b" " * (most + 1))
    assert (status, value["error"]["code"]) == (413, "request_too_large")
    assert client.send("POST", COMPLETIONS, b'{"prompt":"a","max_tokens":1}'.ljust(most))[0] == 200


def test_bodies_that_come_at_once_stay_within_a_bound(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_BODIES", 1)
    service, most = client.service, client.service.max_body
    assert service.body_bytes == 0
    with socket.create_connection(("127.0.0.1", client.port), timeout=30) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {most}\r\n\r\n"
        connection.sendall(head.encode() + b" " * (most - 100))
        wait_until(lambda: service.body_bytes == most - 100)
        with pytest.raises(openai.InternalServerError, match="too many other requests"):
            client.complete("a" * 100, 1)
        wait_until(lambda: service.body_bytes == most - 100)
    wait_until(lambda: service.body_bytes == 0)
    assert client.complete("c", 1) == client.greedy("c", 1)[1]


def test_clients_that_go_away_stop_the_work_and_leave_the_server_well(
    client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "PROBE_SECONDS", 0.01)
    steps, advance = itertools.count(), PaddedBatch.advance

    def counted(batch: PaddedBatch, tokens: Tensor) -> Tensor:
        next(steps)
        time.sleep(0.001)
        return advance(batch, tokens)

    monkeypatch.setattr(PaddedBatch, "advance", counted)
    _hang_up(client, b'{"prompt":')  # less than it announced
    for stream in (b"true", b"false"):
        for _ in range(MAX_RUNNING + 1):
            _hang_up(client, b'{"prompt":"c","max_tokens":250,"stream":' + stream + b"}", whole=True)
    client.post(COMPLETIONS, prompt="a", max_tokens=1)
    assert next(steps) < 2 * (MAX_RUNNING + 1) * 250 / 4
    wait_until(lambda: client.service._running == client.service._tokens == client.service._requests == 0)
    assert "Traceback" not in capsys.readouterr().err


def _hang_up(client: Client, body: bytes, *, whole: bool = False) -> None:
    length = len(body) if whole else 100
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", client.port), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(0.02)


def test_fifty_clients_at_once_take_turns_and_do_not_mix(client: Client) -> None:
    prompts = ["The quick", "def add(", "今天", "👍", "Hello", "a b c", "x", "123", ";", "Once"] * 5
    expected = {prompt: client.greedy(prompt, 4)[1] for prompt in set(prompts)}
    with ThreadPoolExecutor(len(prompts)) as threads:
        found = list(threads.map(lambda prompt: client.complete(prompt, 4), prompts))
    assert found == [expected[prompt] for prompt in prompts]


def test_too_many_requests_are_told_and_none_waits_for_ever(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_REQUESTS", 0)
    with pytest.raises(openai.InternalServerError, match="too many other requests"):
        client.complete("a", 1)
    monkeypatch.undo()
    monkeypatch.setattr(service_module, "MAX_RUNNING", 0)
    monkeypatch.setattr(service_module, "QUEUE_SECONDS", 0.05)
    with pytest.raises(openai.InternalServerError, match="too many other requests"):
        client.official.completions.create(model="tiny", prompt="a", stream=True)
    monkeypatch.undo()
    assert client.complete("c", 1) == client.greedy("c", 1)[1]


def test_keys_and_values_of_all_requests_stay_within_the_memory(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    live: weakref.WeakSet[GenerationCache] = weakref.WeakSet()
    make, most = GenerationCache.__init__, [0]

    def counted(cache: GenerationCache, *arguments: Any, **how: Any) -> None:
        make(cache, *arguments, **how)
        live.add(cache)
        most.append(sum(one.nbytes for one in live))

    config = loaded.model.config
    width = config.kv_channels or config.hidden_size // config.num_attention_heads
    groups = config.num_query_groups or config.num_attention_heads
    memory = 100 * 2 * config.num_layers * groups * width * 4  # of keys and values in fp32
    with serving(loaded, memory=memory) as client:
        assert client.service.room == 100
        monkeypatch.setattr(GenerationCache, "__init__", counted)
        for asked in (99, 200, 240):
            with pytest.raises(openai.BadRequestError, match=r"--serve-memory.*max_tokens may be at most 97") as caught:
                client.complete("abc", asked)
            assert caught.value.code == "memory_exceeded"
        with pytest.raises(openai.BadRequestError, match="no room for an answer"):
            client.complete("a" * 100, 1)
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda prompt: client.complete(prompt, 40), "cdef"))
        monkeypatch.undo()
        assert memory / 2 < max(most) <= memory
        assert found == [client.greedy(prompt, 40)[1] for prompt in "cdef"]


def test_prompts_are_tokenized_few_at_a_time(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    now, most, lock = 0, 0, threading.Lock()
    tokenizer, tokenize = client.loaded.tokenizer, client.loaded.tokenizer.tokenize_batch

    def slow(texts: Sequence[str]) -> list[list[int]]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.05)
        with lock:
            now -= 1
        return tokenize(texts)

    monkeypatch.setattr(tokenizer, "tokenize_batch", slow)
    with ThreadPoolExecutor(3 * MAX_READING) as threads:
        for _ in range(3 * MAX_READING):
            threads.submit(client.post, COMPLETIONS, prompt="a", max_tokens=1)
    assert most == MAX_READING


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, lambda text: {"prompt": ["a", text]}),
        (CHAT, lambda text: {"messages": [{"role": "user", "content": text}]}),
    ],
)
def test_what_is_too_long_by_its_characters_is_not_tokenized(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str, fields: Callable[[str], dict[str, Any]]
) -> None:
    most = client.loaded.most_characters
    longest, tokenizer = 0, client.loaded.tokenizer

    def measured(tokenize: Callable[..., Any], texts: Sequence[str], **how: Any) -> Any:
        nonlocal longest
        longest = max(longest, *map(len, texts))
        return tokenize(texts, **how)

    for name in ("tokenize_batch", "tokenize_alone"):
        monkeypatch.setattr(tokenizer, name, partial(measured, getattr(tokenizer, name)))
    for length in (most - 200, most + 1):
        longest = 0
        status, value = client.send("POST", path, json.dumps(fields("a" * length)).encode())
        assert (status, value["error"]["code"]) == (400, "context_length_exceeded")
        assert "context" in value["error"]["message"]
        assert longest == 0 if length > most else longest >= length


def test_a_port_in_use_is_named(client: Client) -> None:
    with pytest.raises(UserError, match=f"--serve {client.port}: .*another port"):
        listen(client.port)


def test_a_client_that_lets_the_server_wait_is_dropped(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "WAIT_SECONDS", 0)
    monkeypatch.setattr(service_module, "MAX_RUNNING", 1)
    fields = {"prompt": ["a"] * 4, "max_tokens": 250, "stream": True, "temperature": 9, "stop": "nowhere"}
    body = json.dumps(fields).encode()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (COMPLETIONS.encode(), len(body))
    with serving(loaded, send_buffer=4096) as client, contextlib.ExitStack() as stack:

        def connect(content: bytes) -> socket.socket:
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.settimeout(30)
            one.connect(("127.0.0.1", client.port))
            one.sendall(content)
            return one

        reader = connect(head + body)
        assert reader.recv(1)
        assert client.complete("c", 1) == client.greedy("c", 1)[1]
        for one in (connect(b""), connect(head[:20]), connect(head + body[:9])):
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""


def test_idle_connections_leave_room_for_others(loaded: LoadedModel) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(loaded) as client, contextlib.ExitStack() as stack:
        for number in range(2 * MAX_CONNECTIONS):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", client.port), timeout=30))
            if number % 2:
                one.sendall(request)
                assert one.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert client.complete("c", 1) == client.greedy("c", 1)[1]


def test_a_server_that_ends_tells_those_that_it_answers(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = PaddedBatch.advance
    monkeypatch.setattr(PaddedBatch, "advance", lambda *arguments: time.sleep(0.01) or advance(*arguments))
    with serving(loaded) as client:
        stream = client.official.completions.create(model="tiny", prompt="c", max_tokens=250, stream=True)
        next(stream)
        client.service._closing = True  # as `stop` does
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError, match="the server is shutting down"):
            client.complete("a", 1)


def test_a_model_is_named_as_the_user_names_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_hf(tmp_path / "snapshot", template=False)
    (tmp_path / "my model").symlink_to(folder)
    monkeypatch.chdir(folder)
    given = {"layout.threads_per_rank": 1}
    names = [load_huggingface_for_generation(one, given=given).name for one in (".", f"{folder}/")]
    assert names == ["snapshot", "snapshot"]
    loaded = load_huggingface_for_generation(str(tmp_path / "my model"), given=given)
    adapted = loaded.with_adapter("runs/lora/", ["a note"])
    assert (loaded.name, adapted.name, adapted.notes[-1]) == ("my model", "my model+lora", "a note")
    with serving(adapted) as client:
        assert client.send("GET", "/v1/models/my%20model+lora")[1]["id"] == "my model+lora"
        assert client.post(COMPLETIONS, model="my model+lora", prompt="a")["model"] == "my model+lora"
        assert client.send("GET", "/")[1]["POST"] == [COMPLETIONS]
        status, value = client.send("POST", CHAT, json.dumps({"messages": HELLO}).encode())
        assert (status, "no chat template" in value["error"]["message"]) == (400, True)
