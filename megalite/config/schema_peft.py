"""The section of a run's description that says which added weights are trained beside frozen ones."""

# ruff: noqa: RUF009 (flag() makes a dataclass field, so a list in it is not shared)

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema_field import flag


@dataclass
class PeftConfig:
    """Training a few added weights beside a frozen model: finetune.py alone."""

    peft: str = flag(
        "none",
        "lora: low-rank matrices beside linear layers; prefix: keys and values before those of every layer; prompt: "
        "embeddings before those of the text",
        choices=("none", "lora", "prefix", "prompt"),
    )
    lora_rank: int = flag(16, "rank of the added matrices")
    lora_alpha: float = flag(32, "the product of the two matrices is multiplied by this / rank")
    lora_dropout: float = flag(0.0, "dropout on the input of the added matrices")
    lora_target_modules: list[str] | None = flag(
        None, "linear layers that get such matrices, or all-linear; default q_proj,k_proj,v_proj,o_proj"
    )
    use_rslora: bool = flag(False, "multiply by alpha / sqrt(rank) instead of alpha / rank")
    num_virtual_tokens: int = flag(20, "length of the prefix or prompt")
    prefix_projection: bool = flag(False, "train a small network that computes the prefix, instead of the prefix")
    prefix_hidden_size: int | None = flag(None, "inner width of that network; default --hidden-size")
    prompt_init_text: str | None = flag(
        None, "text whose embeddings the prompt starts from, repeated or cut to its length; default: random numbers"
    )
    save_adapter: str | None = flag(None, "folder for the trained weights alone, in PEFT's format")
    save_best_adapter: str | None = flag(None, "folder for the adapter of the lowest validation loss so far")
    load_adapter: str | None = flag(
        None, "folder of an adapter in PEFT's format to start from; it decides kind, rank, scale, targets and length"
    )
