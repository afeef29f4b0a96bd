"""Bytes of a run on one rank as closed formulas."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import ModelConfig, RunConfig


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank."""

    parameters: int
    main_gradients: int
    main_parameters: int
    moments: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.main_gradients + self.main_parameters + self.moments + self.activations


def estimate_memory(
    config: RunConfig, local_parameters: int, vocab_size: int, *, fused_attention: bool
) -> MemoryEstimate:
    """Prediction for a rank that holds `local_parameters`, without sharding of the optimizer.

    Activations: Korthikanti et al. 2022, s·b·h(34 + 5as/h) a layer in half precision, twice that in float32; the
    attention term goes with fused attention. The output layer's logits and their gradient are added. Of one process:
    parallel layouts hold less.
    """
    precision = config.precision
    compute = 2 if precision.bf16 or precision.fp16 else 8 if precision.fp64 else 4
    wide = 8 if precision.fp64 else 4
    moments = 2 if config.optimizer.optimizer == "adam" else 1
    return MemoryEstimate(
        parameters=compute * local_parameters,
        main_gradients=wide * local_parameters,
        main_parameters=wide * local_parameters if compute != wide else 0,
        moments=moments * wide * local_parameters,
        activations=_activations(config, compute, vocab_size, fused_attention=fused_attention),
    )


def _activations(config: RunConfig, compute: int, vocab_size: int, *, fused_attention: bool) -> int:
    model: ModelConfig = config.model
    assert model.hidden_size and model.num_layers is not None and model.num_attention_heads
    assert config.data.seq_length and config.training.micro_batch_size
    tokens = config.data.seq_length * config.training.micro_batch_size
    per_token = 34.0 * model.hidden_size
    if not fused_attention:
        per_token += 5.0 * model.num_attention_heads * config.data.seq_length
    logits = 2 * tokens * vocab_size * compute  # and their gradient
    return int(tokens * per_token * model.num_layers * compute / 2) + logits
