"""The configuration of the network."""

# ruff: noqa: RUF009 (flag() makes a dataclass field, so a list in it is not shared)

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema_experts import ExpertFields
from megalite.config.schema_field import ABOVE_ZERO, AT_LEAST_ONE, BELOW_ONE, UP_TO_65536, Bound, flag
from megalite.config.schema_latent import LatentFields

ROTARY = ("rope", "yarn", "dynamic", "longrope")  # kinds of positions that rotate queries and keys


@dataclass
class TransformerFields:
    """The transformer: its parameters and what it computes."""

    preset: str | None = flag(
        None, "named model, e.g. gpt2-345m or llama-7b: sets the network flags that you leave out"
    )
    num_layers: int = flag(None, "number of transformer layers", bound=UP_TO_65536, needed=True)
    hidden_size: int = flag(None, "width of the hidden states", needed=True)
    ffn_hidden_size: int = flag(
        None, "width inside the MLP; default 4 x hidden, with --swiglu two thirds of that in multiples of 64"
    )
    num_attention_heads: int = flag(None, "number of query heads", needed=True)
    kv_channels: int = flag(None, "width of one head; default hidden / heads")
    group_query_attention: bool = flag(False, "share keys and values between groups of query heads")
    num_query_groups: int = flag(1, "key/value heads, with --group-query-attention")
    max_position_embeddings: int = flag(
        None, "longest sequence, and rows of the learned position table; default --seq-length without such a table"
    )
    position_embedding_type: str = flag(
        "learned_absolute",
        "kind of position encoding; dynamic is dynamic NTK scaling",
        choices=("learned_absolute", *ROTARY, "none"),
    )
    rotary_base: float = flag(10000, "base of the rotary frequencies", bound=ABOVE_ZERO)
    rotary_percent: float = flag(
        1.0,
        "share of each head's width that is rotated",
        bound=Bound("must be above 0 and at most 1", lambda value: 0 < value <= 1),
    )
    rotary_interleaved: bool = flag(False, "rotate pairs of neighbouring channels (GPT-J, GLM) instead of halves")
    use_rope_scaling: bool = flag(False, "scale rotary frequencies as Llama 3.1 does")
    rope_scaling_factor: float = flag(
        8.0, "new length / original length, with --use-rope-scaling, yarn, dynamic or longrope", bound=ABOVE_ZERO
    )
    rope_low_freq_factor: float = flag(
        1.0, "wavelengths above (original length / this) are scaled by the full factor", bound=ABOVE_ZERO
    )
    rope_high_freq_factor: float = flag(
        4.0, "wavelengths below (original length / this) are not scaled", bound=ABOVE_ZERO
    )
    rope_original_max_position_embeddings: int = flag(8192, "original length: longest sequence before the scaling")
    rope_attention_factor: float | None = flag(
        None,
        "yarn and longrope: factor on cosines and sines; default: computed from --rope-scaling-factor",
        bound=ABOVE_ZERO,
    )
    yarn_beta_fast: float | None = flag(
        None,
        "yarn: channel pairs with more rotations than this in the original length are not scaled; default 32",
        bound=ABOVE_ZERO,
    )
    yarn_beta_slow: float | None = flag(
        None,
        "yarn: channel pairs with fewer rotations than this are scaled by the full factor; default 1",
        bound=ABOVE_ZERO,
    )
    yarn_correction_range_round_to_int: bool = flag(
        True,
        "yarn: do not round the channel pair numbers computed from --yarn-beta-fast and --yarn-beta-slow",
        option="--no-yarn-correction-range-round-to-int",
    )
    yarn_mscale: float | None = flag(
        None,
        "yarn: weight of ln(factor) in the numerator of the attention factor; needs --yarn-mscale-all-dim",
        bound=ABOVE_ZERO,
    )
    yarn_mscale_all_dim: float | None = flag(
        None,
        "yarn: weight of ln(factor) in the denominator of the attention factor; needs --yarn-mscale",
        bound=ABOVE_ZERO,
    )
    longrope_short_factor: list[float] | None = flag(
        None, "longrope: factor of each channel pair, for sequences up to the original length", bound=ABOVE_ZERO
    )
    longrope_long_factor: list[float] | None = flag(
        None, "longrope: factor of each channel pair, for longer sequences", bound=ABOVE_ZERO
    )
    rotary_seq_len_interpolation_factor: float | None = flag(
        None, "linear scaling: divide positions by this", bound=AT_LEAST_ONE
    )
    normalization: str = flag("LayerNorm", "kind of norm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, "added to the variance in a norm", bound=ABOVE_ZERO)
    apply_layernorm_1p: bool = flag(False, "store norm weights minus one, so that weight decay pulls them towards one")
    swiglu: bool = flag(False, "gated SiLU (SwiGLU) in the MLP")
    squared_relu: bool = flag(False, "squared ReLU in the MLP")
    openai_gelu: bool = flag(False, "the tanh approximation of GELU in the MLP")
    add_bias_linear: bool = flag(True, "leave out the biases of the linear layers", option="--disable-bias-linear")
    add_qkv_bias: bool = flag(False, "biases in the QKV projection even with --disable-bias-linear")
    add_proj_bias: bool = flag(False, "a bias in the attention's output projection even with --disable-bias-linear")
    qk_layernorm: bool = flag(False, "normalise queries and keys per head")
    untie_embeddings_and_output_weights: bool = flag(False, "separate weights for the output layer and the embedding")
    model_vocab_size: int | None = flag(None, "rows of the embedding table; default: the tokenizer's number of ids")
    make_vocab_size_divisible_by: int = flag(128, "pad the vocabulary's rows in memory to a multiple of this x TP")
    window_size: str | None = flag(
        None,
        "sliding attention window LEFT,RIGHT: tokens visible before and after, -1 for all; default: all earlier tokens",
    )
    attention_backend: str = flag(
        "auto",
        "attention kernel; unfused and local: plain matrix products; the others: scaled_dot_product_attention",
        choices=("auto", "flash", "fused", "unfused", "local"),
    )
    init_method_std: float = flag(0.02, "standard deviation of the initial weights")
    hidden_dropout: float = flag(0.1, "dropout on embeddings and on each sublayer's output", bound=BELOW_ONE)
    attention_dropout: float = flag(0.1, "dropout on attention weights", bound=BELOW_ONE)
    attention_softmax_in_fp32: bool = flag(
        False, "changes nothing: the softmax is always computed in float32 (float64 with --fp64)"
    )
    label_smoothing: float = flag(
        0.0, "share of the target's weight spread evenly over the vocabulary in training", bound=BELOW_ONE
    )


@dataclass
class ModelConfig(LatentFields, ExpertFields, TransformerFields):
    """The network: its parameters and what it computes. (Fields of the last base come first.)"""
