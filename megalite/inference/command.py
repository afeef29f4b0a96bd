"""What `tools/generate.py` does once its flags are read: continue prompts, talk in a terminal, or serve.

Key idea: standard output has the text and nothing else; what there is to say about it goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from megalite.checkpoint.huggingface.hub import local_folder
from megalite.checkpoint.huggingface.travel import TEMPLATE_FILE, tokenizer_of
from megalite.checkpoint.storage import refuse_other_kind
from megalite.config.errors import FlagError
from megalite.files.atomic import together
from megalite.files.remote import here, place
from megalite.inference.chat import Dialogue, converse, open_dialogue
from megalite.inference.load import LoadedModel, load_for_generation, load_huggingface_for_generation
from megalite.inference.options import GenerationOptions
from megalite.inference.text import Writing, check_text, encode_prompts


def load_model(given: argparse.Namespace, overrides: Mapping[str, Any]) -> LoadedModel:
    """The model that `--load` or `--load-hf` names, with the tokenizer and the chat template that lie beside
    `--adapter` where the flags don't name others."""
    if given.adapter is not None:
        overrides = _tokenizer_beside_adapter(given, overrides)
    if given.load_hf is not None:
        given.load_hf = local_folder(given.load_hf, given.hub)
        return load_huggingface_for_generation(given.load_hf, given=overrides, ignored=given.ignore_config_field)
    return load_for_generation(given.load, step=given.ckpt_step, given=overrides)


def _tokenizer_beside_adapter(given: argparse.Namespace, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    folder, given.fetched = here(together(place(given.adapter)))
    refuse_other_kind(folder, "--adapter")  # before a model is loaded
    if given.chat_template is None and (folder / TEMPLATE_FILE).is_file():
        given.chat_template = str(folder / TEMPLATE_FILE)
    found = tokenizer_of(folder, 1)
    if found.tokenizer_type == "NullTokenizer" or any(path.startswith("tokenizer.") for path in overrides):
        return overrides
    theirs = {f"tokenizer.{name}": value for name, value in vars(found).items() if value is not None}
    return {**overrides, **theirs}


def run(loaded: LoadedModel, given: argparse.Namespace, options: GenerationOptions) -> None:
    """Do what the flags ask for."""
    tell(*loaded.notes, *options.notes())
    if given.serve is not None:
        from megalite.inference.server import serve  # here, since only this needs the packages of [serve]

        serve(loaded, options, _dialogue_if_any(loaded, given), given.serve, given.serve_memory)
        return
    dialogue = open_dialogue(loaded, _template(loaded, given), given.system) if given.chat else None
    if given.prompts:
        continue_prompts(loaded, dialogue, given.prompts, options, as_json=given.json)
    else:
        assert dialogue is not None
        talk(loaded, dialogue, options)


def _template(loaded: LoadedModel, given: argparse.Namespace) -> str | None:
    """What was given, else what the model was fine-tuned with."""
    template: str | None = given.chat_template
    return loaded.config.finetune.chat_template if template is None else template


def _dialogue_if_any(loaded: LoadedModel, given: argparse.Namespace) -> Dialogue | None:
    """A server without a template still completes text."""
    try:
        return open_dialogue(loaded, _template(loaded, given), given.system)
    except FlagError:
        if given.chat or given.chat_template is not None:
            raise
        return None


def continue_prompts(
    loaded: LoadedModel, dialogue: Dialogue | None, prompts: list[str], options: GenerationOptions, *, as_json: bool
) -> None:
    """Print each prompt's continuation, or with `dialogue` the answer to it; one prompt on a terminal as it comes."""
    if dialogue is None:
        ids, ends = encode_prompts(loaded.tokenizer, prompts), loaded.ends
    else:
        check_text(prompts)
        ids = [dialogue.prompt([*dialogue.opening, {"role": "user", "content": prompt}]) for prompt in prompts]
        ends = dialogue.ends
    writing = Writing(loaded, ids, options, stop=ends)
    live = len(prompts) == 1 and not as_json and sys.stdout.isatty()
    shown = prompts if dialogue is None else [""] * len(prompts)
    begin = time.perf_counter()
    if live:
        show(shown[0])
    for texts in writing:
        if live:
            show(texts[0])
    seconds = time.perf_counter() - begin
    for number, (prompt, before, result) in enumerate(zip(prompts, shown, writing.results, strict=True), start=1):
        if as_json:
            show(json.dumps({"prompt": prompt, "text": result.text, "tokens": result.tokens}) + "\n")
            continue
        if len(prompts) > 1:
            show(f"--- prompt {number} of {len(prompts)} ---\n")
        show("\n" if live else before + result.text + "\n")
    tell(f"{writing.tokens} tokens in {seconds:.1f} s ({writing.tokens / seconds:.1f} tokens/s)")


def talk(loaded: LoadedModel, dialogue: Dialogue, options: GenerationOptions) -> None:
    """A conversation on standard input and output."""
    interactive = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # so that a line that is no text is refused alone
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives `input` a history and editing)
        tell("/reset starts a new conversation, /exit ends; Ctrl-C stops an answer")
    read: Callable[[], str] = lambda: input("> " if interactive else "")  # noqa: E731
    converse(loaded, dialogue, options, read=read, show=show)


def show(text: str) -> None:
    """Text on standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def tell(*lines: str) -> None:
    """Lines on standard error."""
    sys.stderr.write("".join(line + "\n" for line in lines))
