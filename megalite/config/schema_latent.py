"""The configuration of multi-latent attention and of multi-token prediction (DeepSeek-AI 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema_field import NOT_NEGATIVE, flag


@dataclass
class LatentFields:
    """Keys and values from a short latent vector; further tokens predicted beside the next."""

    multi_latent_attention: bool = flag(
        False, "multi-latent attention (MLA, DeepSeek-V2); its latents are normalised with --qk-layernorm"
    )
    q_lora_rank: int | None = flag(None, "MLA: width of the queries' latent; default: none, a full projection")
    kv_lora_rank: int = flag(32, "MLA: width of the latent of keys and values")
    qk_head_dim: int = flag(128, "MLA: width of a head's queries and keys that isn't rotated")
    qk_pos_emb_head_dim: int = flag(64, "MLA: width of a head's queries and keys that is rotated")
    v_head_dim: int = flag(128, "MLA: width of a head's values")
    mtp_num_layers: int | None = flag(
        None, "tokens to predict beside the next, by a layer each (MTP); default: none", bound=NOT_NEGATIVE
    )
    mtp_loss_scaling_factor: float = flag(0.1, "weight of the mean loss of the MTP layers")
