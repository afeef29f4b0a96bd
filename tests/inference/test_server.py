"""The server as its clients see it: OpenAI's form over plain HTTP, bounds, and no end by any request."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megalite.config.errors import UserError
from megalite.inference import server as server_module
from megalite.inference.chat import open_dialogue
from megalite.inference.generate import PaddedBatch, generate
from megalite.inference.load import LoadedModel, load_huggingface_for_generation
from megalite.inference.options import GenerationOptions
from megalite.inference.server import MAX_CONNECTIONS, ApiServer
from megalite.inference.service import MAX_READING, MAX_RUNNING, Service
from tests.inference.checkpoints import save_hf

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


class Client:
    """Plain HTTP to one server."""

    def __init__(self, server: ApiServer, loaded: LoadedModel):
        self.server, self.loaded, self.port = server, loaded, server.port

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

    def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        status, text = self.send("POST", path, json.dumps({**fields, "stream": True}).encode())
        assert status == 200
        *events, done, rest = text.decode("utf-8").split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def greedy(self, prompt: str, count: int) -> tuple[list[int], str]:
        tokenizer = self.loaded.tokenizer
        ids = tokenizer.tokenize(prompt)
        options = GenerationOptions(max_new_tokens=count)
        (new,) = generate(self.loaded.model, [ids], options, stop=self.loaded.ends, unknown=self.loaded.unknown)
        return new, tokenizer.detokenize([*ids, *new])[len(prompt) :]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = save_hf(tmp_path_factory.mktemp("server") / "tiny")
    loaded = load_huggingface_for_generation(str(folder), given={"layout.threads_per_rank": 1})
    service = Service(loaded, GenerationOptions(max_new_tokens=24), open_dialogue(loaded, None))
    with serving(ApiServer(service, 0)) as client:
        yield client
    service.close()


@contextlib.contextmanager
def serving(server: ApiServer) -> Iterator[Client]:
    """A client of a server that runs; the service is not closed."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Client(server, server.service.loaded)
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_says_how_it_is_and_what_it_has(client: Client) -> None:
    assert client.send("GET", "/health") == (200, {"status": "ok"})
    status, models = client.send("GET", "/v1/models")
    assert (status, [model["id"] for model in models["data"]]) == (200, ["tiny"])
    assert client.send("GET", "/v1/models/tiny")[1] == models["data"][0]
    paths = client.send("GET", "/")[1]
    assert all(client.send("GET", path)[0] == 200 for path in paths["GET"])
    assert (paths["model"], paths["POST"]) == ("tiny", [COMPLETIONS, CHAT])


def test_a_completion_is_the_greedy_continuation_with_its_counts(client: Client) -> None:
    tokens, text = client.greedy("The quick", 10)
    answer = client.post(COMPLETIONS, model="tiny", prompt="The quick", max_tokens=10)
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": text, "logprobs": None, "finish_reason": "length" if len(tokens) == 10 else "stop"}
    ]
    prompt = len(client.loaded.tokenizer.tokenize("The quick"))
    counts = {"prompt_tokens": prompt, "completion_tokens": len(tokens), "total_tokens": prompt + len(tokens)}
    assert answer["usage"] == counts


def test_several_prompts_and_ids_are_answered_in_order(client: Client) -> None:
    prompts = ["The quick", "def add(", "今天"]
    ids = [client.loaded.tokenizer.tokenize(prompt) for prompt in prompts]
    for given in (prompts, ids):
        answer = client.post(COMPLETIONS, prompt=given, max_tokens=6)
        assert [one["text"] for one in answer["choices"]] == [client.greedy(prompt, 6)[1] for prompt in prompts]
    assert (
        client.post(COMPLETIONS, prompt=ids[0], max_tokens=6)["choices"][0]["text"] == client.greedy(prompts[0], 6)[1]
    )


def test_a_stream_joined_is_the_whole_answer(client: Client) -> None:
    for path, fields in ((COMPLETIONS, {"prompt": ["今天", "The"]}), (CHAT, {"messages": HELLO})):
        how = {**fields, "temperature": 2.0, "seed": 5, "max_tokens": 20}
        whole = client.post(path, **how)
        events = client.events(path, **how, stream_options={"include_usage": True})
        assert events[-1]["usage"] == whole["usage"]
        assert events[-1]["choices"] == []
        for choice in whole["choices"]:
            pieces = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
            if path == CHAT:
                assert pieces[0]["delta"]["role"] == "assistant"
                text, joined = choice["message"]["content"], "".join(one["delta"].get("content", "") for one in pieces)
            else:
                text, joined = choice["text"], "".join(one["text"] for one in pieces)
            assert joined == text
            assert [one["finish_reason"] for one in pieces if one["finish_reason"]] == [choice["finish_reason"]]


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


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (COMPLETIONS, b"{", 400, "not JSON"),
        (COMPLETIONS, b"\xff\xfe", 400, "not JSON"),
        (COMPLETIONS, b"[" * 100_000, 400, "not JSON"),
        (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400, "NaN"),
        (COMPLETIONS, b"[]", 400, "must be a JSON object"),
        (COMPLETIONS, {}, 400, "prompt must be a string"),
        (COMPLETIONS, {"prompt": []}, 400, "none of them empty"),
        (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt must be a string"),
        (COMPLETIONS, {"prompt": [448]}, 400, "outside the vocabulary"),
        (COMPLETIONS, {"prompt": [1, 430]}, 400, "prompt holds the id 430, which the tokenizer does not have"),
        (COMPLETIONS, {"prompt": [[1], [404]]}, 400, "prompt holds the id 404"),
        (COMPLETIONS, {"prompt": [True]}, 400, "prompt must be a string"),
        (COMPLETIONS, {"prompt": ["a"] * 17}, 400, "at most 16 prompts"),
        (COMPLETIONS, {"prompt": ["a"] * 9, "max_tokens": 200}, 400, "at most 1024"),
        (COMPLETIONS, {"prompt": "\ud800"}, 400, "prompt holds '\\ud800', half of a surrogate pair: not valid UTF-8"),
        (COMPLETIONS, b'{"prompt": "a\xed\xa0\x80"}', 400, "not valid UTF-8"),
        (COMPLETIONS, {"prompt": ["a", "\udc00\ud800"]}, 400, "not valid UTF-8"),
        (COMPLETIONS, {"prompt": "a", "stop": "\ud800"}, 400, "stop holds"),
        (COMPLETIONS, {"prompt": "a", "\ud800": 1}, 400, "not valid UTF-8"),
        (CHAT, {"messages": [{"role": "\ud800", "content": "x"}]}, 400, "messages holds"),
        (CHAT, {"messages": [{"role": "user", "content": "\udfff"}]}, 400, "messages holds"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
            400,
            "messages holds",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "x", "name": "\ud800"}]}, 400, "messages holds"),
        (COMPLETIONS, b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", 400, ""),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens must be at least 1"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "9"}, 400, 'max_tokens must be a whole number, not "9"'),
        (COMPLETIONS, {"prompt": "a", "max_tokens": True}, 400, "max_tokens must be a whole number, not true"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 10**30}, 400, "context is 256"),
        (COMPLETIONS, {"prompt": "a b c d " * 100}, 400, "context is 256"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, 400, "temperature must be"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, 400, "top_p must be"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**70}, 400, "seed must fit"),
        (COMPLETIONS, {"prompt": "a", "stop": ""}, 400, "stop must be"),
        (COMPLETIONS, {"prompt": "a", "stop": {"a": 1}}, 400, "stop must be"),
        (COMPLETIONS, {"prompt": "a", "stop": [1]}, 400, "stop must be"),
        (COMPLETIONS, {"prompt": "a", "n": 2}, 400, "n is not supported"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 5}, 400, "logprobs is not supported"),
        (COMPLETIONS, {"prompt": "a", "temprature": 1}, 400, "unknown field 'temprature'"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, 400, "stream must be true or false"),
        (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "no model 'other'"),
        (CHAT, {}, 400, "messages must be a list"),
        (CHAT, {"messages": []}, 400, "messages must be a list"),
        (CHAT, {"messages": ["a"]}, 400, "must be an object"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "content must be a string"),
        (
            CHAT,
            {"messages": [{"role": 1, "content": "a"}]},
            400,
            "role must be one of system, user, assistant, tool, developer",
        ),
        (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, 400, "role must be one of"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "type text alone"),
        (CHAT, {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, 400, "tool_calls"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools is not supported"),
        ("/v1/embeddings", {}, 404, "there is no /v1/embeddings"),
        ("/health", {}, 405, "takes GET"),
        ("/", {}, 405, "takes GET"),
    ],
)
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


def raw(client: Client, content: bytes) -> bytes:
    """All that the server answers to some bytes."""
    with socket.create_connection(("127.0.0.1", client.port), timeout=30) as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", b"411"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"411"),
        (b"GET /health HTTP/1.1\r\nHost: evil.example:80\r\n\r\n", b"403"),
        (b"BREW /tea HTTP/1.1\r\nHost: localhost\r\n\r\n", b"501"),
        (b"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", b"501"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 200 + b"\r\n", b"431"),
        (b"PUT /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300000\r\n\r\n" + b" " * 300_000, b"501"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"411"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{", b"400"),
        (b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"405"),
        (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"404"),
    ],
)
def test_broken_http_is_refused_with_a_json_error(client: Client, content: bytes, status: bytes) -> None:
    alive = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for before in (b"", alive):
        answer = raw(client, before + content)
        if before:
            healthy, answer = answer[: answer.index(b"}") + 1], answer[answer.index(b"}") + 1 :]
            assert healthy.endswith(b'{"status": "ok"}')
        assert re.match(rb"HTTP/1\.1 " + status + b" ", answer), answer[:100]
        assert json.loads(answer.rpartition(b"\r\n")[2])["error"]["message"]


def test_the_body_of_a_get_is_not_the_next_request(client: Client) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=30)
    for method, path, status in (("GET", "/health", 200), ("GET", COMPLETIONS, 405), ("GET", "/health", 200)):
        connection.request(method, path, b"GET /nothing HTTP/1.1\r\n\r\n")
        answer = connection.getresponse()
        assert answer.status == status, answer.read()
        answer.read()
    connection.close()


def test_head_tells_the_length_and_sends_no_body(client: Client) -> None:
    for path, status in (("/v1/models", 200), (COMPLETIONS, 405), ("/nothing", 404)):
        request = f" {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        head, _, body = raw(client, b"GET" + request).partition(b"\r\n\r\n")
        found, _, none = raw(client, b"HEAD" + request).partition(b"\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 %d " % status)
        assert (none, f"Content-Length: {len(body)}".encode() in found) == (b"", True)
        assert (b"Allow: POST" in head) == (status == 405)


def test_the_host_s_case_does_not_matter(client: Client) -> None:
    assert client.send("GET", "/health", Host="LOCALHOST:80")[0] == 200
    assert client.send("GET", "/health", Host="localhost.example")[0] == 403


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_client_that_has_said_all_and_still_reads_is_answered(client: Client, version: bytes, stream: bytes) -> None:
    body = b'{"prompt":"The quick","max_tokens":9,"stream":' + stream + b"}"
    head = b"POST /v1/completions HTTP/%s\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (version, len(body))
    answer = raw(client, head + body)
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert version == b"1.1" or interim not in answer
    head, _, found = answer.removeprefix(interim).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    if stream == b"true":
        events = [json.loads(event[6:]) for event in found.split(b"\n\n")[:-2]]
        text = "".join(event["choices"][0]["text"] for event in events)
    else:
        text = json.loads(found)["choices"][0]["text"]
    assert text == client.greedy("The quick", 9)[1]


def test_a_body_beyond_the_bound_is_refused(client: Client) -> None:
    most = client.server.service.max_body
    status, value = client.send("POST", COMPLETIONS, b" " * (most + 1))
    assert (status, value["error"]["code"]) == (413, "request_too_large")
    assert client.send("POST", COMPLETIONS, b'{"prompt":"a","max_tokens":1}'.ljust(most))[0] == 200


def test_clients_that_go_away_stop_the_work_and_leave_the_server_well(
    client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, advance = itertools.count(), PaddedBatch.advance

    def counted(batch: PaddedBatch, tokens: Tensor) -> Tensor:
        next(steps)
        return advance(batch, tokens)

    monkeypatch.setattr(PaddedBatch, "advance", counted)
    _hang_up(client, b'{"prompt":')  # less than it announced
    for stream in (b"true", b"false"):
        for _ in range(MAX_RUNNING + 1):
            _hang_up(client, b'{"prompt":"a","max_tokens":250,"stream":' + stream + b"}", whole=True)
    client.post(COMPLETIONS, prompt="a", max_tokens=1)
    assert next(steps) < 2 * (MAX_RUNNING + 1) * 250 / 4
    assert "Traceback" not in capsys.readouterr().err


def _hang_up(client: Client, body: bytes, *, whole: bool = False) -> None:
    length = len(body) if whole else 100
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", client.port), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(0.02)


def test_requests_at_once_take_turns_and_do_not_mix(client: Client) -> None:
    prompts = ["The quick", "def add(", "今天", "👍", "Hello", "a b c"]
    expected = [client.greedy(prompt, 16)[1] for prompt in prompts]
    found: dict[str, str] = {}

    def ask(prompt: str) -> None:
        found[prompt] = client.post(COMPLETIONS, prompt=prompt, max_tokens=16)["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[prompt] for prompt in prompts] == expected


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
    threads = [
        threading.Thread(target=client.post, args=(COMPLETIONS,), kwargs={"prompt": "a", "max_tokens": 1})
        for _ in range(3 * MAX_READING)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
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
    assert most is not None
    longest, tokenize = 0, client.loaded.tokenizer.tokenize_batch

    def measured(texts: Sequence[str]) -> list[list[int]]:
        nonlocal longest
        longest = max(longest, *map(len, texts))
        return tokenize(texts)

    monkeypatch.setattr(client.loaded.tokenizer, "tokenize_batch", measured)
    for length in (most - 200, most + 1):
        longest = 0
        status, value = client.send("POST", path, json.dumps(fields("a" * length)).encode())
        assert (status, value["error"]["code"]) == (400, "context_length_exceeded")
        assert "context" in value["error"]["message"]
        assert longest == 0 if length > most else longest >= length


def test_one_connection_serves_several_requests(client: Client) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=30)
    for body, status in ((b'{"prompt":"a","max_tokens":1}', 200), (b"{", 400), (b'{"prompt":"a","max_tokens":1}', 200)):
        connection.request("POST", COMPLETIONS, body)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status
    connection.close()


def test_a_port_in_use_is_named(client: Client) -> None:
    with pytest.raises(UserError, match=f"--serve {client.port}: .*another port"):
        ApiServer(client.server.service, client.port)


def test_a_client_too_slow_with_its_answer_gives_its_place_to_others(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "WRITE_SECONDS", 0.5)
    body = json.dumps({"prompt": ["a"] * 4, "max_tokens": 250, "stream": True, "temperature": 9, "stop": "nowhere"})
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    server = ApiServer(client.server.service, 0)
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with serving(server), contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.socket()) for _ in range(MAX_RUNNING)]
        for one in slow:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(("127.0.0.1", server.port))
            one.sendall((head + body).encode())
        for one in slow:
            assert one.recv(16)
        stop = threading.Event()

        def trickle() -> None:
            while not stop.wait(0.1):
                for one in slow:
                    with contextlib.suppress(OSError):
                        one.recv(64, socket.MSG_DONTWAIT)

        reader = threading.Thread(target=trickle)
        reader.start()
        begin = time.monotonic()
        client.post(COMPLETIONS, prompt="a", max_tokens=1)
        stop.set()
        reader.join()
        assert time.monotonic() - begin < 20


def test_one_client_more_than_there_are_places_is_told(client: Client) -> None:
    assert MAX_CONNECTIONS <= 256  # each has a thread
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    before = threading.active_count()
    with serving(ApiServer(client.server.service, 0)) as fresh:
        idle = [socket.create_connection(("127.0.0.1", fresh.port), timeout=30) for _ in range(MAX_CONNECTIONS)]
        head, _, body = raw(fresh, request).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert "connections" in json.loads(body)["error"]["message"]
        assert threading.active_count() <= before + 2 + MAX_CONNECTIONS
        for one in idle:
            one.close()
        end = time.monotonic() + 20
        while not (answer := raw(fresh, request)).startswith(b"HTTP/1.1 200"):
            assert time.monotonic() < end, answer


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
    service = Service(adapted, GenerationOptions(max_new_tokens=2), None)
    with serving(ApiServer(service, 0)) as client:
        assert client.send("GET", "/v1/models/my%20model+lora")[1]["id"] == "my model+lora"
        assert client.post(COMPLETIONS, model="my model+lora", prompt="a")["model"] == "my model+lora"
        assert client.send("GET", "/")[1]["POST"] == [COMPLETIONS]
    service.close()


def test_without_a_template_chats_are_refused_and_completions_answered(tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "bare", template=False)
    loaded = load_huggingface_for_generation(str(folder), given={"layout.threads_per_rank": 1})
    service = Service(loaded, GenerationOptions(max_new_tokens=2), None)
    with serving(ApiServer(service, 0)) as client:
        status, value = client.send("POST", CHAT, json.dumps({"messages": HELLO}).encode())
        assert (status, "no chat template" in value["error"]["message"]) == (400, True)
        assert client.post(COMPLETIONS, prompt="a")["choices"]
    service.close()
