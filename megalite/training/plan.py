"""What this rank does in a step, by the number of microbatches."""

from __future__ import annotations

from megalite.config.resolve import virtual_stages
from megalite.config.schema import RunConfig
from megalite.pipeline.lowering import lower
from megalite.pipeline.schedules import Action, build_schedule, forward_only


class Plan:
    """Lowered schedules of one pipeline rank, made once for each number of microbatches."""

    def __init__(self, config: RunConfig, rank: int):
        """Of a resolved configuration; `rank`: along the pipeline."""
        layout = config.layout
        self.name, self.rank = layout.pipeline_schedule, rank
        self.stages, self.chunks = layout.pipeline_model_parallel_size, virtual_stages(config)
        self.group_size = layout.microbatch_group_size_per_virtual_pipeline_stage
        self._training: dict[int, list[Action]] = {}
        self._evaluation: dict[int, list[Action]] = {}

    def training(self, microbatches: int) -> list[Action]:
        """Forwards and backwards. A UserError where the schedule can't do this number."""
        if microbatches not in self._training:
            self._training[microbatches] = self.training_of_all(microbatches)[self.rank]
        return self._training[microbatches]

    def training_of_all(self, microbatches: int) -> list[list[Action]]:
        """As `training`, of each pipeline rank."""
        schedule = build_schedule(self.name, self.stages, self.chunks, microbatches, group_size=self.group_size)
        return lower(schedule, self.stages, self.chunks)

    def evaluation(self, microbatches: int) -> list[Action]:
        """Forwards alone."""
        if microbatches not in self._evaluation:
            schedule = forward_only(self.stages, self.chunks, microbatches)
            self._evaluation[microbatches] = lower(schedule, self.stages, self.chunks)[self.rank]
        return self._evaluation[microbatches]
