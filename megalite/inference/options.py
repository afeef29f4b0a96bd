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
        count, t, k, p, seed = self.max_new_tokens, self.temperature, self.top_k, self.top_p, self.seed
        rest = "leave it out to sample among all tokens"
        _refuse_if(
            {
                f"--max-new-tokens {count} must be at least 1": count < 1,
                f"--temperature {t} must be 0 (greedy) or a positive number": not 0 <= t < math.inf,
                f"--top-k {k} must be at least 1; {rest}": k is not None and k < 1,
                f"--top-p {p} must be above 0 and at most 1; {rest}": p is not None and not 0 < p <= 1,
                f"--seed {seed} must be between 0 and {2**63 - 1}": not 0 <= seed < 2**63,
            }
        )

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
    serving, port, memory = given.serve is not None, given.serve, given.serve_memory
    needed = ("pydantic", "starlette", "uvicorn") if serving else ()
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    asked, converses = bool(given.prompts), given.chat or serving
    _refuse_if(
        {
            "give exactly one of --load and --load-hf": (given.load is None) == (given.load_hf is None),
            "--ckpt-step needs --load": given.ckpt_step is not None and given.load is None,
            f"--serve {port} must be a port from 0 (any free port) to 65535": serving and not 0 <= port < 2**16,
            f"--serve needs {', '.join(missing)}: pip install -e '.[serve]' in megalite's folder": bool(missing),
            "--serve takes its prompts from requests: leave --prompt, --prompt-file and --json out": (
                serving and (asked or given.json)
            ),
            f"--serve-memory {memory} must be a positive number of GiB": (
                serving and memory is not None and not 0 < memory < math.inf
            ),
            "nothing to do: give --prompt, --prompt-file, --chat or --serve": not (asked or converses),
            "--json needs --prompt or --prompt-file": given.json and not asked and not serving,
            "--chat-template needs --chat or --serve": given.chat_template is not None and not converses,
            "--system needs --chat or --serve": given.system is not None and not converses,
            "--serve-memory needs --serve": memory is not None and not serving,
        }
    )


def _refuse_if(problems: dict[str, bool]) -> None:
    """A FlagError with the texts of those that are the case."""
    refuse([text for text, is_so in problems.items() if is_so])
