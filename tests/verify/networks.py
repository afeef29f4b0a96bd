"""Networks of the proof matrix, as unresolved configurations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TypeVar

from megalite.config.schema import (
    LayoutConfig,
    LearningRateConfig,
    ModelConfig,
    PrecisionConfig,
    RunConfig,
    TokenizerConfig,
)
from megalite.config.schema_finetune import FinetuneConfig, PeftConfig
from megalite.verify.configs import for_proof
from megalite.verify.layouts import Variant
from megalite.verify.small import for_matrix

STEPS = 10
ALL_LINEAR = ["all-linear"]
REPLACED = ["samples.jsonl"]  # the proof writes its own
FINETUNING: dict[str, tuple[FinetuneConfig, PeftConfig]] = {
    "packed answers, LoRA": (
        FinetuneConfig(sft_data=REPLACED, sft_packing=True),
        PeftConfig("lora", lora_rank=3, lora_target_modules=ALL_LINEAR),
    ),
    "packed answers, all weights": (FinetuneConfig(sft_data=REPLACED, sft_packing=True), PeftConfig()),
    "answers, prefix from a network": (
        FinetuneConfig(sft_data=REPLACED),
        PeftConfig("prefix", prefix_projection=True, prefix_hidden_size=12),
    ),
    "packed answers, prompt": (FinetuneConfig(sft_data=REPLACED, sft_packing=True), PeftConfig("prompt")),
    "labels, LoRA with dropout beside some layers": (
        FinetuneConfig(task="classification", sft_data=REPLACED),
        PeftConfig(
            "lora", lora_rank=3, lora_dropout=0.2, lora_target_modules=["q_proj,v_proj", "down_proj"], use_rslora=True
        ),
    ),
}
"""What a run learns, and which added weights learn it."""
WITH_GPT2S_LAYERS = (
    "packed answers, all weights",
    "packed answers, prompt",
    "labels, LoRA with dropout beside some layers",
)
"""The others have Llama's."""
FOUR_LAYERS = Variant(pp=2, chunks=2)
"""A network for it fits every layout of up to TP 4 x PP 4, or PP 2 x VPP 2."""
Case = TypeVar("Case")


def network(
    variant: Variant,
    *,
    tied: bool = True,
    dropout: float = 0.0,
    llama: bool = False,
    latent: bool = False,
    ahead: int = 0,
    steps: int = STEPS,
    finetuning: str | None = None,
    folder: Path | None = None,
    precision: PrecisionConfig | None = None,
) -> RunConfig:
    """GPT-2's or Llama's kinds of layer with 131 ids, a prime: padded vocabularies are always exercised. Layers and
    batch are the least that shows `variant`.

    `latent`: Llama's with multi-latent attention. `ahead`: tokens predicted beside the next. `finetuning`: one of
    FINETUNING, with its samples in `folder`; None: pretraining. `precision`: of FP8.
    """
    model = ModelConfig(
        hidden_dropout=dropout,
        attention_dropout=dropout,
        untie_embeddings_and_output_weights=not tied,
        make_vocab_size_divisible_by=1,
    )
    if llama or latent:
        model.position_embedding_type, model.normalization, model.swiglu = "rope", "RMSNorm", True
        model.add_bias_linear, model.group_query_attention, model.qk_layernorm = False, not latent, True
    if latent:
        model.multi_latent_attention, model.q_lora_rank = True, 20
    if ahead:
        model.mtp_num_layers, model.mtp_loss_scaling_factor = ahead, 0.7
        model.position_embedding_type = "rope"
    config = RunConfig(
        model=model,
        layout=LayoutConfig(),
        learning_rate=LearningRateConfig(lr=1e-3, lr_decay_style="constant"),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=130),
        precision=precision or PrecisionConfig(),
    )
    if (llama or latent) and finetuning is None:
        # Each document by itself, its end not counted: ranks then count different numbers of tokens.
        config.data.reset_position_ids = config.data.reset_attention_mask = config.data.eod_mask_loss = True
    if finetuning is not None:
        config.finetune, config.peft = FINETUNING[finetuning]
    return for_matrix(for_proof(config, steps), variant, folder)


def covering(
    cases: Sequence[Case],
    values: Callable[[Case], list[tuple[str, Hashable]]],
    together: int,
    cost: Callable[[Case], int],
) -> list[Case]:
    """Few of the cases in which all values that occur `together` (in twos: 2) in any do; of equally good ones the
    cheaper."""
    found = [set(itertools.combinations(values(case), together)) for case in cases]
    missing = set().union(*found)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(found[number] & missing) - cost(cases[number]) / 100)
        chosen.append(cases[best])
        missing -= found[best]
    return chosen
