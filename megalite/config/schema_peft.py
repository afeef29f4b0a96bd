"""The configuration of adapters: added weights that are trained while the model is frozen."""

# ruff: noqa: RUF009 (flag() makes a dataclass field, so a list in it is not shared)

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema_field import ABOVE_ZERO, BELOW_ONE, flag


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
        None, "linear layers that get LoRA matrices, or all-linear; default q_proj,k_proj,v_proj,o_proj"
    )
    use_rslora: bool = flag(False, "multiply by alpha / sqrt(rank) instead of alpha / rank")
    num_virtual_tokens: int = flag(20, "length of the prefix or prompt")
    prefix_projection: bool = flag(False, "train a small network that computes the prefix, not the prefix itself")
    prefix_hidden_size: int | None = flag(None, "inner width of --prefix-projection's network; default --hidden-size")
    prompt_init_text: str | None = flag(
        None, "the prompt starts from this text's embeddings, repeated or cut to length; default: random numbers"
    )
    save_adapter: str | None = flag(None, "folder for the adapter, in PEFT's format", writes="model")
    save_best_adapter: str | None = flag(
        None, "folder for the adapter with the lowest validation loss so far", writes="model"
    )
    load_adapter: str | None = flag(
        None, "folder of an adapter in PEFT's format to start from; it sets kind, rank, scale, targets and length"
    )
