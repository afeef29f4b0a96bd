"""The sections of a run's description that finetune.py alone has."""

# ruff: noqa: RUF009 (flag() makes a dataclass field, so a list in it is not shared)

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema_field import flag

HUBS = ("huggingface", "modelscope")


def unnamed_classes(count: int) -> list[str]:
    """What transformers calls classes that nobody named."""
    return [f"LABEL_{number}" for number in range(count)]


@dataclass
class FinetuneConfig:
    """Teaching a model that exists: finetune.py alone."""

    load_hf: str | None = flag(
        None,
        "Hugging Face folder, or OWNER/NAME of a model on a hub, to take network, weights, tokenizer and chat template "
        "from",
    )
    hub: str = flag("huggingface", "where --load-hf OWNER/NAME is downloaded from", choices=HUBS)
    ignore_config_field: list[str] | None = flag(
        None,
        "fields of the model's config.json that aren't understood and that you know to change nothing",
        repeatable=True,
    )
    task: str | None = flag(
        None,
        "lm: next tokens of --data-path; sft: answers of --sft-data; classification: labels of --sft-data; default sft "
        "with --sft-data, else lm",
        choices=("lm", "sft", "classification"),
    )
    sft_data: list[str] | None = flag(
        None,
        "JSON lines, or a JSON list, of messages, conversations (ShareGPT), instruction and output (Alpaca), or prompt "
        "and completion; with --task classification of text and label",
    )
    train_epochs: int | None = flag(None, "passes over --sft-data to train, instead of --train-iters")
    sft_valid_data: list[str] | None = flag(None, "the same for validation")
    sft_valid_share: float = flag(0.0, "share of --sft-data that validation gets, where it has no files of its own")
    sft_packing: bool = flag(False, "several samples in a row, each with attention and positions of its own")
    sft_long_answers: str = flag(
        "error", "what becomes of a sample whose answers go beyond a row", choices=("error", "truncate", "drop")
    )
    chat_template: str | None = flag(
        None, "chatml, or a file: how conversations become text; default: the tokenizer's own template"
    )
    class_names: list[str] | None = flag(None, "the labels in order; default: those in --sft-data, sorted")
    eval_prompt: list[str] | None = flag(
        None,
        "texts that the model answers after each validation, for you to read; may be given several times",
        repeatable=True,
    )
