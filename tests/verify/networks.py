"""Networks of the proof matrix, as unresolved configurations."""

from __future__ import annotations

from megalite.config.schema import LayoutConfig, LearningRateConfig, ModelConfig, RunConfig, TokenizerConfig
from megalite.verify.configs import for_matrix, for_proof

STEPS = 10


def network(*, tied: bool = True, dropout: float = 0.0, llama: bool = False, steps: int = STEPS) -> RunConfig:
    """GPT-2's or Llama's kinds of layer with 131 ids, a prime: padded vocabularies are always exercised."""
    model = ModelConfig(
        hidden_dropout=dropout,
        attention_dropout=dropout,
        untie_embeddings_and_output_weights=not tied,
        make_vocab_size_divisible_by=1,
    )
    if llama:
        model.position_embedding_type, model.normalization, model.swiglu = "rope", "RMSNorm", True
        model.add_bias_linear, model.group_query_attention, model.qk_layernorm = False, True, True
    config = RunConfig(
        model=model,
        layout=LayoutConfig(),
        learning_rate=LearningRateConfig(lr=1e-3, lr_decay_style="constant"),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=130),
    )
    return for_matrix(for_proof(config, steps))
