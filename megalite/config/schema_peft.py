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
    lora_alpha: float = flag(32, "their product is scaled by this / rank")
    lora_dropout: float = flag(0.0, "dropout on the input of the added matrices")
    lora_target_modules: list[str] | None = flag(
        None, "linear layers that get them, or all-linear; default q_proj,k_proj,v_proj,o_proj"
    )
    use_rslora: bool = flag(False, "scale by alpha / sqrt(rank) instead")
    num_virtual_tokens: int = flag(20, "length of the prefix or prompt")
    prefix_projection: bool = flag(False, "the prefix comes from a small network that is trained instead")
    prefix_hidden_size: int | None = flag(None, "its inner width; default: hidden")
    prompt_init_text: str | None = flag(
        None, "text whose embeddings the prompt starts from, repeated or cut to its length; default: random numbers"
    )
    save_adapter: str | None = flag(None, "folder for the trained weights alone, in PEFT's format")
    save_best_adapter: str | None = flag(None, "folder for the adapter of the lowest validation loss so far")
    load_adapter: str | None = flag(
        None, "folder of an adapter in PEFT's format to start from; it says kind, rank, scale, targets and length"
    )
