"""Which layers each pipeline stage owns.

Key idea: the model is cut into stages x chunks spans in the order in which an activation passes them: chunk c of rank r
is global stage c · stages + r. Every layer is in exactly one span, by its global number.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.resolve import pipeline_units, virtual_stages
from megalite.config.schema import RunConfig


@dataclass(frozen=True)
class StageSpan:
    """What one stage owns: layers [first, last) and whether the embedding and the output are here.

    `tied_stages`: pipeline ranks that hold a copy of the embedding table, where the last stage needs it too: as its
    output, or to embed the tokens of multi-token prediction.
    """

    first_layer: int
    last_layer: int
    has_embedding: bool
    has_output: bool
    tied_stages: tuple[int, ...] | None = None


def whole_model(num_layers: int) -> StageSpan:
    """The span of a single stage."""
    return StageSpan(0, num_layers, True, True)


def layers_per_stage(config: RunConfig) -> list[int]:
    """Layers of every global stage, for a configuration that `config.check` found sound."""
    layout = config.layout
    stages, chunks = layout.pipeline_model_parallel_size, virtual_stages(config)
    total = config.model.num_layers
    first, last = layout.decoder_first_pipeline_num_layers, layout.decoder_last_pipeline_num_layers
    if first is None and last is None:
        counts = [pipeline_units(config) // (stages * chunks)] * (stages * chunks)
        counts[0] -= layout.account_for_embedding_in_pipeline_split
        counts[-1] -= layout.account_for_loss_in_pipeline_split
    else:
        middle = stages - (first is not None) - (last is not None)
        each = (total - (first or 0) - (last or 0)) // max(1, middle)
        by_rank = [each] * stages
        if first is not None:
            by_rank[0] = first
        if last is not None:
            by_rank[-1] = last
        counts = [count // chunks for count in by_rank] * chunks
    assert sum(counts) == total, f"stages of {counts} layers do not make {total}"
    return counts


def stage_spans(config: RunConfig) -> list[list[StageSpan]]:
    """For each pipeline rank, the spans of its chunks in order."""
    stages = config.layout.pipeline_model_parallel_size
    counts = layers_per_stage(config)
    tied = (not config.model.untie_embeddings_and_output_weights or bool(config.model.mtp_num_layers)) and stages > 1
    tied = tied and config.finetune.task != "classification"  # which has no output over the vocabulary
    spans: list[list[StageSpan]] = [[] for _ in range(stages)]
    begin = 0
    for number, count in enumerate(counts):
        first, last = number == 0, number == len(counts) - 1
        holders = (0, stages - 1) if tied and (first or last) else None
        spans[number % stages].append(StageSpan(begin, begin + count, first, last, holders))
        begin += count
    return spans
