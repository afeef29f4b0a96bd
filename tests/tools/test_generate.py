"""`tools/generate.py` from its flags to what it prints."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megalite.config.errors import FlagError
from megalite.config.schema import TokenizerConfig
from megalite.data.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from tests.data.corpora import sentencepiece_model
from tests.helpers import LLAMA, call_script, load_tool
from tests.inference.checkpoints import save_hf, save_tiny

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "generate.py"
SAMPLED = ("--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--max-new-tokens", "12")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool(SCRIPT)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of a rotary model and its tokenizer."""
    folder = tmp_path_factory.mktemp("run")
    model = sentencepiece_model(folder)
    tokenizer = TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)
    save_tiny(folder / "checkpoints", tokenizer=tokenizer, vocab_size=400, **LLAMA)
    return folder


def words(run: Path, *flags: str) -> list[str]:
    return ["--load", str(run / "checkpoints"), "--threads-per-rank", "1", *flags]


def call(tool: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """What the tool prints on stdout and stderr when it succeeds."""
    assert tool.main(list(arguments)) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def as_json(tool: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    out, _ = call(tool, capsys, *arguments, "--json")
    return [json.loads(line) for line in out.splitlines()]


def test_the_command_prints_one_json_object_a_prompt(run: Path) -> None:
    prompts = ["--prompt", "The quick", "--prompt", "今天天气很好", "--prompt", ""]
    done = call_script(SCRIPT, *words(run, *prompts, *SAMPLED, "--json"))
    assert done.returncode == 0, done.stderr
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["prompt"] for one in objects] == ["The quick", "今天天气很好", ""]
    tokenizer = SentencePieceTokenizer(str(run / "small.model"))
    for one in objects:
        assert set(one) == {"prompt", "text", "tokens"}
        assert 0 < len(one["tokens"]) <= 12
        assert tokenizer.eod not in one["tokens"]
        prompt = tokenizer.tokenize(one["prompt"])
        assert one["prompt"] + one["text"] == tokenizer.detokenize(prompt + one["tokens"])


def test_a_bad_number_ends_with_status_2_before_torch_is_loaded(run: Path) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"sys.argv = {[str(SCRIPT), *words(run, '--prompt', 'x', '--top-p', '1.5')]!r}\n"
        "try:\n"
        f"    runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "finally:\n"
        "    print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr.splitlines() == [
        "generate.py: error: --top-p 1.5 must be above 0 and at most 1; leave it out to sample among all tokens"
    ]


def test_prompt_and_continuation_are_printed_as_one_text(
    tool: ModuleType, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = words(run, "--prompt", "The quick", *SAMPLED)
    (one,) = as_json(tool, capsys, *flags)
    out, err = call(tool, capsys, *flags)
    assert out == one["prompt"] + one["text"] + "\n"
    notes, speed, rest = err.split("\n")
    assert notes == f"iteration 10 of {run / 'checkpoints'}, fp32 on cpu"
    assert re.fullmatch(r"12 tokens in \d+\.\d s \(\d+\.\d tokens/s\)", speed)
    assert rest == ""


def test_several_prompts_are_told_apart(tool: ModuleType, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = words(run, "--prompt", "The", "--prompt", "def", "--max-new-tokens", "4")
    first, second = as_json(tool, capsys, *flags)
    out, _ = call(tool, capsys, *flags)
    assert out == f"--- prompt 1 of 2 ---\nThe{first['text']}\n--- prompt 2 of 2 ---\ndef{second['text']}\n"


def test_a_terminal_sees_the_same_piece_by_piece(
    tool: ModuleType, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = words(run, "--prompt", "小明说", *SAMPLED)
    whole, _ = call(tool, capsys, *flags)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    writes: list[str] = []
    original = sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda text: writes.append(text) or original(text))
    live, _ = call(tool, capsys, *flags)
    assert live == whole
    assert len([text for text in writes if text]) > 4


def test_a_prompt_can_come_from_a_file_in_its_place_among_the_others(
    tool: ModuleType, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("def f():\n    return\n", encoding="utf-8")
    flags = words(run, "--prompt=@a", "--prompt-file", str(file), "--prompt=-b", "--max-new-tokens", "1")
    assert [one["prompt"] for one in as_json(tool, capsys, *flags)] == ["@a", "def f():\n    return", "-b"]


def test_what_has_no_effect_is_said(tool: ModuleType, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = call(tool, capsys, *words(run, "--prompt", "a", "--top-k", "5", "--max-new-tokens", "1"))
    assert "--top-k: no effect with --temperature 0" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "give --prompt, --prompt-file"),
        (("--prompt", "a", "--load-hf", "b"), "exactly one of --load and --load-hf"),
        (("--prompt", "a", "--serve", "0"), "--serve takes its prompts from requests"),
        (("--serve", "65536"), "--serve 65536 must be a port"),
        (("--serve", "0", "--serve-memory", "0"), "--serve-memory 0.0 must be a positive number"),
        (("--serve", "0", "--serve-memory", "1e-9"), "--serve-memory 1e-09 GiB is too little for two tokens"),
        (("--prompt", "a", "--serve-memory", "1"), "--serve-memory needs --serve"),
        (("--chat", "--json"), "--json needs --prompt"),
        (("--prompt", "a", "--system", "b"), "--system needs --chat or --serve"),
        (("--chat",), "give --chat-template chatml or a file"),
        (("--prompt", "a", "--top-p", "0"), "--top-p 0.0 must be above 0"),
        (("--prompt", "a", "--bf16", "--fp16"), "--bf16 and --fp16 exclude each other"),
        (("--prompt", "a", "--promt", "b"), "did you mean --prompt"),
        (("--prompt-file", "/nowhere/at all"), "/nowhere/at all: No such file"),
    ],
)
def test_bad_flags_are_named(tool: ModuleType, run: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(FlagError, match=message):
        tool.main(words(run, *flags))


def test_a_server_without_its_packages_says_how_to_install_them(
    tool: ModuleType, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FlagError, match=r"--serve needs pydantic, starlette, uvicorn: pip install -e '\.\[serve\]'"):
        tool.main(words(run, "--serve", "0"))


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tmp_path_factory.mktemp("hf") / "tiny")


def test_a_prompt_of_a_chat_is_a_user_s_message(tool: ModuleType, hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--load-hf", str(hf), "--threads-per-rank", "1", "--max-new-tokens", "5"]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    (plain,) = as_json(tool, capsys, *flags, "--prompt", text)
    (chat,) = as_json(tool, capsys, *flags, "--chat", "--system", "Be brief.", "--prompt", "Hello")
    assert chat == {**plain, "prompt": "Hello"}
    out, _ = call(tool, capsys, *flags, "--chat", "--system", "Be brief.", "--prompt", "Hello")
    assert out == chat["text"] + "\n"


def test_a_conversation_is_read_line_by_line(
    tool: ModuleType, hf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/reset\nHello\n/exit\n"))
    out, _ = call(tool, capsys, "--load-hf", str(hf), "--threads-per-rank", "1", "--chat", "--max-new-tokens", "6")
    first, second = out.split("(a new conversation)\n")
    assert first == second != ""


def test_an_adapter_is_put_on_the_model(
    tool: ModuleType, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(hf, local_files_only=True)
    how = peft.LoraConfig(r=4, lora_alpha=64, init_lora_weights=False, target_modules="all-linear")
    theirs = peft.get_peft_model(base, how)
    theirs.save_pretrained(tmp_path)
    ids = HuggingFaceTokenizer(str(hf)).tokenize("Hello")
    suppressed = list(range(HuggingFaceTokenizer(str(hf)).vocab_size, theirs.config.vocab_size))
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "suppress_tokens": suppressed}
    expected = theirs.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist()
    flags = ["--load-hf", str(hf), "--threads-per-rank", "1", "--prompt", "Hello", "--max-new-tokens", "12"]
    (plain,) = as_json(tool, capsys, *flags)
    (adapted,) = as_json(tool, capsys, *flags, "--adapter", str(tmp_path))
    assert adapted["tokens"] == expected != plain["tokens"]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_signal_ends_the_server_in_the_middle_of_an_answer(hf: Path, number: signal.Signals) -> None:
    command = [sys.executable, str(SCRIPT), "--load-hf", str(hf), "--threads-per-rank", "1", "--serve", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        lines = [server.stderr.readline() for _ in range(3)]
        found = re.match(r"tiny on (http://127\.0\.0\.1:\d+/v1); Ctrl-C stops it", lines[1])
        assert found is not None, lines
        curl, url, data, example = shlex.split(lines[2].removeprefix("try: "))
        assert (curl, url, data) == ("curl", f"{found[1]}/chat/completions", "-d")
        with urllib.request.urlopen(url, example.encode(), timeout=60) as answer:
            assert json.load(answer)["choices"]
        body = json.dumps({"prompt": "c", "max_tokens": 250, "stream": True}).encode()
        with urllib.request.urlopen(f"{found[1]}/completions", body, timeout=60) as answer:
            assert answer.readline().startswith(b"data: {")
            server.send_signal(number)
            status = server.wait(timeout=30)
        said = server.stderr.read()
        assert (status, said.endswith("the server ends\n")) == (0, True), said
