"""The server as its clients see it: OpenAI's form over plain HTTP, bounds, and no end by any request."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megalite.config.errors import UserError
from megalite.inference.chat import open_dialogue
from megalite.inference.generate import PaddedBatch, generate
from megalite.inference.load import LoadedModel, load_huggingface_for_generation
from megalite.inference.options import GenerationOptions
from megalite.inference.server import MAX_CONNECTIONS, MAX_RUNNING, ApiServer, Service
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
    server = ApiServer(Service(loaded, GenerationOptions(max_new_tokens=24), open_dialogue(loaded, None)), 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Client(server, loaded)
    server.shutdown()
    thread.join()
    server.close()


def test_it_says_how_it_is_and_what_it_has(client: Client) -> None:
    assert client.send("GET", "/health") == (200, {"status": "ok"})
    status, models = client.send("GET", "/v1/models")
    assert (status, [model["id"] for model in models["data"]]) == (200, ["tiny"])
    assert client.send("GET", "/v1/models/tiny")[1] == models["data"][0]


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
        (COMPLETIONS, {"prompt": [True]}, 400, "prompt must be a string"),
        (COMPLETIONS, {"prompt": ["a"] * 17}, 400, "at most 16 prompts"),
        (COMPLETIONS, {"prompt": ["a"] * 9, "max_tokens": 200}, 400, "at most 1024"),
        (COMPLETIONS, {"prompt": "\ud800"}, 400, "not valid UTF-8"),
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
        (CHAT, {"messages": [{"role": 1, "content": "a"}]}, 400, "role must be a string"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "type text alone"),
        (CHAT, {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, 400, "tool_calls"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools is not supported"),
        ("/v1/embeddings", {}, 404, "there is no /v1/embeddings"),
        ("/health", {}, 405, "takes GET"),
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
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"405"),
        (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"404"),
    ],
)
def test_broken_http_is_refused_with_a_json_error(client: Client, content: bytes, status: bytes) -> None:
    answer = raw(client, content)
    assert status in answer.split(b"\r\n")[0] or b'"error"' in answer
    assert json.loads(answer.rpartition(b"\r\n")[2])["error"]["message"]


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


def test_one_connection_serves_several_requests(client: Client) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=30)
    for body, status in ((b'{"prompt":"a","max_tokens":1}', 200), (b"{", 400), (b'{"prompt":"a","max_tokens":1}', 200)):
        connection.request("POST", COMPLETIONS, body)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status
    connection.close()


def _health(server: ApiServer) -> bytes:
    """What a new connection is answered; nothing where the server hangs up on it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except ConnectionError:
            return b""


def test_connections_beyond_the_bound_are_closed_at_once_and_a_free_place_is_given_again(client: Client) -> None:
    assert MAX_CONNECTIONS <= 256  # each has a thread
    server = ApiServer(client.server.service, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    before = threading.active_count()
    thread.start()
    try:
        idle = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(MAX_CONNECTIONS)]
        assert _health(server) == b""
        assert threading.active_count() <= before + 1 + MAX_CONNECTIONS
        for connection in idle[:2]:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b" 200 " in connection.recv(1 << 16)  # those within it are served
            connection.close()
        end = time.monotonic() + 20
        while not (answer := _health(server)) and time.monotonic() < end:
            time.sleep(0.01)
        assert b" 200 " in answer
        for connection in idle:
            connection.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()  # the service is the other server's too


def test_a_port_in_use_is_named(client: Client) -> None:
    with pytest.raises(UserError, match=f"--serve {client.port}: .*another port"):
        ApiServer(client.server.service, client.port)


def test_without_a_template_chats_are_refused_and_completions_answered(tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "bare", template=False)
    loaded = load_huggingface_for_generation(str(folder), given={"layout.threads_per_rank": 1})
    server = ApiServer(Service(loaded, GenerationOptions(max_new_tokens=2), None), 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    client = Client(server, loaded)
    status, value = client.send("POST", CHAT, json.dumps({"messages": HELLO}).encode())
    assert (status, "no chat template" in value["error"]["message"]) == (400, True)
    assert client.post(COMPLETIONS, prompt="a")["choices"]
    server.shutdown()
    thread.join()
    server.close()
