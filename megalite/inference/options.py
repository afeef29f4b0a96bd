"""How to generate: the flags and the numbers behind them.

Imports no torch, so that `--help` is instant and a bad flag refused at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from dataclasses import dataclass, fields
from pathlib import Path

from megalite.config.errors import refuse


@dataclass(frozen=True)
class GenerationOptions:
    """`max_new_tokens`: per prompt. `temperature`: divides the logits; 0 takes the likeliest token (greedy).
    `top_k`: sample among the k likeliest only. `top_p`: among the fewest tokens whose probabilities, after
    temperature and top-k, reach p (nucleus sampling, Holtzman et al. 2020). `seed`: of all prompts' draws."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 1234

    def __post_init__(self) -> None:
        """Raises a FlagError that names every number out of range."""
        k, p, t, rest = self.top_k, self.top_p, self.temperature, "leave it out to sample among all tokens"
        right = {
            f"--max-new-tokens {self.max_new_tokens} must be at least 1": self.max_new_tokens >= 1,
            f"--temperature {t} must be 0 (greedy) or a positive number": 0 <= t < math.inf,
            f"--top-k {k} must be at least 1; {rest}": k is None or k >= 1,
            f"--top-p {p} must be above 0 and at most 1; {rest}": p is None or 0 < p <= 1,
            f"--seed {self.seed} must be between 0 and {2**63 - 1}": 0 <= self.seed < 2**63,
        }
        refuse([problem for problem, holds in right.items() if not holds])

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def notes(self) -> list[str]:
        """One line for each number that has no effect beside the others."""
        given = [name for name, value in (("--top-k", self.top_k), ("--top-p", self.top_p)) if value is not None]
        if self.greedy and given:
            return [f"{' and '.join(given)}: no effect with --temperature 0, which always takes the most likely token"]
        return []


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of `GenerationOptions`."""
    default = GenerationOptions()
    add = parser.add_argument_group("generation").add_argument
    tokens = "most tokens to write after each prompt (default: 64; 512 in a conversation or with --serve)"
    add("--max-new-tokens", type=int, metavar="N", help=tokens)
    greedy = "divides the logits; 0 always takes the most likely token (default: 0)"
    add("--temperature", type=float, default=default.temperature, metavar="X", help=greedy)
    add("--top-k", type=int, metavar="N", help="sample from the N most likely tokens (default: all)")
    nucleus = "sample from the most likely tokens that together have this probability (default: all)"
    add("--top-p", type=float, metavar="X", help=nucleus)
    add("--seed", type=int, default=default.seed, metavar="N", help="seed of sampling (default: 1234)")


def read_generation_options(given: argparse.Namespace, *, max_new_tokens: int = 64) -> GenerationOptions:
    """The options of a parsed command line; `max_new_tokens`: where it has none. Raises a FlagError for numbers out of
    range."""
    values = {field.name: getattr(given, field.name) for field in fields(GenerationOptions)}
    if values["max_new_tokens"] is None:
        values["max_new_tokens"] = max_new_tokens
    return GenerationOptions(**values)


def read_prompt(path: str) -> str:
    """The text of a file, for argparse."""
    try:
        return Path(path).read_text("utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None


def check_mode(given: argparse.Namespace) -> None:
    """A FlagError where the flags of the command line don't say what to do, or contradict each other."""
    problems = []
    if (given.load is None) == (given.load_hf is None):
        problems.append("give exactly one of --load and --load-hf")
    if given.ckpt_step is not None and given.load is None:
        problems.append("--ckpt-step needs --load")
    if given.serve is not None:
        if not 0 <= given.serve < 2**16:
            problems.append(f"--serve {given.serve} must be a port from 0 (any free port) to 65535")
        missing = [name for name in ("pydantic", "starlette", "uvicorn") if importlib.util.find_spec(name) is None]
        if missing:
            problems.append(f"--serve needs {', '.join(missing)}: pip install -e '.[serve]' in megalite's folder")
        if given.prompts or given.json:
            problems.append("--serve takes its prompts from requests: leave --prompt, --prompt-file and --json out")
        if given.serve_memory is not None and not 0 < given.serve_memory < math.inf:
            problems.append(f"--serve-memory {given.serve_memory} must be a positive number of GiB")
    elif not given.prompts and not given.chat:
        problems.append("nothing to do: give --prompt, --prompt-file, --chat or --serve")
    if given.json and not given.prompts and given.serve is None:
        problems.append("--json needs --prompt or --prompt-file")
    for name, value in (("--chat-template", given.chat_template), ("--system", given.system)):
        if value is not None and not given.chat and given.serve is None:
            problems.append(f"{name} needs --chat or --serve")
    if given.serve_memory is not None and given.serve is None:
        problems.append("--serve-memory needs --serve")
    refuse(problems)
