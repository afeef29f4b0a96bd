"""What the documentation tells a reader to type is understood: commands and examples parse, and every flag exists."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from megalite.checkpoint import options as conversion
from megalite.config.check import check
from megalite.config.entry import Loaders, fill_from_preset, read_config
from megalite.config.errors import FlagError
from megalite.config.fields import finetuning_sections
from megalite.config.flags import FlagParser, build_parser, parse_flags, parse_namespace
from megalite.config.schema import RunConfig
from megalite.estimate.model import count_parameters
from tests.config.launch_lists import GPT3_175B, LLAMA3_8B, LLAMA3_8B_SHARDING, MIXTRAL_8X7B
from tests.helpers import load_tool

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "README*.md",
        "docs/finetuning.md",
        "docs/precision.md",
        "docs/zh/*.md",
        "examples/**/*.md",
        "examples/**/*.sh",
    )
    for path in ROOT.glob(pattern)
)
CODE = re.compile(r"^```(?:sh|text)\n(.*?)^```$|((?:^    [^\n]*\n)+)", flags=re.MULTILINE | re.DOTALL)
QUOTED_FLAG = re.compile(r"`(--[a-z][a-z0-9_-]*)")
PROGRAM = re.compile(r"(?:^|/)((?:pretrain_gpt|finetune|tools/\w+)\.py)$")
OF_OTHER_PROGRAMS = {"--logdir", "--help", "--standalone", "--nproc-per-node", "--install"}


@cache
def parser_of(program: str, command: str) -> FlagParser | None:
    """The parser of one of our programs; `command`: its next word. None for a program without flags."""
    if program == "pretrain_gpt.py":
        return build_parser(program, "d")
    if program == "finetune.py":
        return build_parser(program, "d", finetuning_sections(), megatron=True)
    if program == "tools/convert_checkpoint.py":
        return conversion.parser(command) if command in conversion.COMMANDS else None
    module = load_tool(ROOT / program)
    parser: FlagParser | None = module.parser() if hasattr(module, "parser") else None
    return parser


def commands(page: str) -> list[tuple[str, list[str]]]:
    """(program, its words) of each line that starts one of our programs; continued lines are joined."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if page.endswith(".md"):
        text = "\n".join(fenced or indented for fenced, indented in CODE.findall(text))
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if ".py" not in line or line.lstrip().startswith("#"):
            continue
        reader = shlex.shlex(line, posix=True, punctuation_chars=";|>")
        reader.whitespace_split = True
        try:
            words = list(reader)
        except ValueError:  # a quoted text that goes on in the next line
            words = line.split()
        for place, word in enumerate(words):
            if program := PROGRAM.search(word):
                found.append((program[1], words[place + 1 :]))
                break
    return found


def exact(words: list[str]) -> bool:
    """Whether a command can be parsed as it stands: no variable of a shell, nothing left out."""
    return not any("$" in word or "..." in word or word in (";", "|", ">", ")") for word in words)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_parse(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for program, words in commands(page):
        parser = parser_of(program, words[0] if words else "")
        if parser is None or "--help" in words:
            continue
        if program == "tools/convert_checkpoint.py":
            words = words[1:]
        for word in words:
            if word.startswith("--"):
                assert parser.knows(word.split("=")[0]), f"{page}: {program} has no {word}"
        if exact(words) and not any(word.startswith("@") and not Path(word[1:]).is_file() for word in words):
            parse_namespace(parser, words)


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith(".md")])
def test_every_flag_that_a_page_names_exists(page: str) -> None:
    programs = ["pretrain_gpt.py", "finetune.py", *(f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py"))]
    parsers = [parser_of(program, "") for program in programs]
    parsers += [conversion.parser(command) for command in conversion.COMMANDS]
    named = set(QUOTED_FLAG.findall((ROOT / page).read_text(encoding="utf-8")))
    known = {name for name in named if any(parser and parser.knows(name) for parser in parsers)}
    assert named - known - OF_OTHER_PROGRAMS == set()


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith(".md")])
def test_every_file_that_a_page_links_to_or_reads_flags_from_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
    for _, words in commands(page):
        files = [word[1:] for word in words if word.startswith("@examples/")]
        assert all((ROOT / file).is_file() for file in files), f"{page}: {files}"


# Commands behind the messages that docs/zh/errors.md explains.
MISTAKES = [
    "--hiden-size 3",
    "--tensor-model-parallel-size 2",
    "--num-attention-heads 3",
    "--global-batch-size 7",
    "--bf16 --fp16",
    "--seq-length 128",
    "@examples/none.args",
]


@pytest.mark.parametrize("words", MISTAKES)
def test_the_page_of_errors_quotes_messages_as_they_are(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(FlagError) as caught:
        read_config(["@examples/tiny.args", *words.split()], "pretrain_gpt.py", "d", world_size=1, loaders=Loaders())
    assert f"**`{caught.value}`**" in (ROOT / "docs/zh/errors.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("command", "excluded", "more"),
    [
        (GPT3_175B, ("--step-batch-size-schedule", "--data-path"), "--initial-loss-scale 65536"),
        (
            f"{LLAMA3_8B} {LLAMA3_8B_SHARDING}",
            ("--train-samples", "--lr-decay-samples", "--lr-warmup-samples"),
            "--num-query-groups 2",
        ),
        (MIXTRAL_8X7B, ("--data-path",), "--num-query-groups 2"),
    ],
    ids=["GPT-3", "Llama 3", "Mixtral"],
)
@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_flags_for_a_small_form_of_a_pasted_command_are_all_that_it_needs(
    page: str, command: str, excluded: tuple[str, ...], more: str
) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert " @examples/small.args\n" in text
    small = f"@{ROOT}/examples/small.args"
    for flag in excluded:
        assert f"`{flag}`" in text
        command, count = re.subn(rf"{flag}( [^-\s]\S*)+", "", command)
        assert count == 1
    config, _ = read_config([*command.split(), *small.split(), *more.split()], "pretrain_gpt.py", "d", world_size=2)
    rows = config.tokenizer.vocab_size
    assert rows is not None and count_parameters(config.model, rows).total < 1_500_000


# ----------------------------------------------------------------------------------------------------------- examples

EXAMPLES = ROOT / "examples"
SHARED = {"llama_common.args", "small.args"}  # included by others, put behind other flags
# Flags that a program adds to an example.
MOCK = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "130"]
ADDED = {"quickstart.args": MOCK, "chinese/model.args": MOCK}
RUNS = sorted(path.name for path in EXAMPLES.glob("*.args") if path.name not in SHARED)


def read(name: str) -> tuple[RunConfig, int, list[str]]:
    """The example's configuration, the processes that its header names, and its notes."""
    found = re.search(r"^# World size: (\d+)$", (EXAMPLES / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert found is not None, f"{name} has no line '# World size: N'"
    config, explicit, notes = parse_flags([f"@{EXAMPLES / name}", *ADDED.get(name, [])], "pretrain_gpt.py", "d")
    fill_from_preset(config, explicit)
    return config, int(found.group(1)), notes


@pytest.mark.parametrize("name", [*RUNS, "chinese/model.args"])
def test_an_example_can_run_in_its_world(name: str) -> None:
    config, world_size, notes = read(name)
    assert check(config, world_size) == []
    assert notes == []
    if name not in ADDED:
        command = f"torchrun --nproc-per-node {world_size} pretrain_gpt.py @examples/{name}"
        assert f"#   {command}\n" in (EXAMPLES / name).read_text(encoding="utf-8")


def test_the_readme_lists_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+\.args)` \|", text, flags=re.MULTILINE)) == RUNS
    assert all(name in text for name in SHARED)
