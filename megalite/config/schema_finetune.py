"""The configuration of fine-tuning and of adapters, which only finetune.py has."""

# ruff: noqa: RUF009 (flag() makes a dataclass field, so a list in it is not shared)

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema_field import ABOVE_ZERO, BELOW_ONE, flag

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


@dataclass
class PeftConfig:
    """Adapters: a few trained weights added to a frozen model, in finetune.py only."""

    peft: str = flag(
        "none",
        "lora: low-rank matrices added to linear layers; prefix: keys and values before those of the text, in every "
        "layer; prompt: embeddings before those of the text",
        choices=("none", "lora", "prefix", "prompt"),
    )
    lora_rank: int = flag(16, "rank of the added matrices")
    lora_alpha: float = flag(32, "the product of the two matrices is multiplied by this / rank", bound=ABOVE_ZERO)
    lora_dropout: float = flag(0.0, "dropout on the input of the added matrices", bound=BELOW_ONE)
    lora_target_modules: list[str] | None = flag(
        None, "linear layers that get LoRA matrices, or all-linear; default: those of attention"
    )
    use_rslora: bool = flag(False, "multiply by alpha / sqrt(rank) instead of alpha / rank")
    num_virtual_tokens: int = flag(20, "length of the prefix or prompt")
    prefix_projection: bool = flag(False, "train a small network that computes the prefix, not the prefix itself")
    prefix_hidden_size: int | None = flag(None, "inner width of --prefix-projection's network; default --hidden-size")
    prompt_init_text: str | None = flag(
        None, "the prompt starts from this text's embeddings, repeated or cut to length; default: random numbers"
    )
    save_adapter: str | None = flag(None, "folder for the adapter, in PEFT's format", writes="model", address=True)
    save_best_adapter: str | None = flag(
        None, "folder for the adapter with the lowest validation loss so far", writes="model", address=True
    )
    load_adapter: str | None = flag(
        None,
        "folder of an adapter in PEFT's format to start from; it sets kind, rank, scale, targets and length",
        address=True,
    )
