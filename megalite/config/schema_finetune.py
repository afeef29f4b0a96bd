"""The configuration of fine-tuning, which only finetune.py has."""

# ruff: noqa: RUF009 (flag() makes a dataclass field, so a list in it is not shared)

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema_field import BELOW_ONE, flag

HUBS = ("huggingface", "modelscope")


def unnamed_classes(count: int) -> list[str]:
    """The default names that transformers gives to classes."""
    return [f"LABEL_{number}" for number in range(count)]


@dataclass
class FinetuneConfig:
    """Fine-tuning, in finetune.py only."""

    load_hf: str | None = flag(
        None,
        "Hugging Face folder, or OWNER/NAME of a model on a hub, that gives network, weights, tokenizer and chat "
        "template",
    )
    hub: str = flag("huggingface", "where --load-hf OWNER/NAME is downloaded from", choices=HUBS)
    ignore_config_field: list[str] | None = flag(
        None,
        "unknown fields of the model's config.json that you know don't change what the model computes",
        repeatable=True,
    )
    task: str = flag(
        None,
        "lm: train on the text of --data-path; sft: on the answers of --sft-data; classification: on its labels; "
        "default sft with --sft-data, else lm",
        choices=("lm", "sft", "classification"),
    )
    sft_data: list[str] | None = flag(
        None,
        "files of JSON lines, or of one JSON list, with messages, conversations (ShareGPT), instruction and output "
        "(Alpaca), or prompt and completion; with --task classification: text and label",
    )
    train_epochs: int | None = flag(None, "passes over --sft-data, instead of --train-iters")
    sft_valid_data: list[str] | None = flag(None, "files for validation, in the format of --sft-data")
    sft_valid_share: float = flag(
        0.0, "share of --sft-data for validation, if --sft-valid-data isn't given", bound=BELOW_ONE
    )
    sft_packing: bool = flag(False, "pack several samples into one row, each with its own attention and positions")
    sft_long_answers: str = flag(
        "error", "what to do with a sample whose answers don't fit --seq-length", choices=("error", "truncate", "drop")
    )
    chat_template: str | None = flag(
        None, "how conversations become text: chatml, or a template file; default: the tokenizer's own template"
    )
    class_names: list[str] | None = flag(None, "the labels in order; default: those in --sft-data, sorted")
    eval_prompt: list[str] | None = flag(
        None,
        "prompts; after each validation the model's answers to them are printed; may be given several times",
        repeatable=True,
    )
