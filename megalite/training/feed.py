"""This rank's microbatches of a run's datasets.

Key idea: training and each evaluation set have a position of their own in the run's state, from which their iterators
start; loader workers begin with the first use and end with `close`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megalite.config.errors import UserError
from megalite.config.schema import RunConfig
from megalite.data.document_mask import SampleSource
from megalite.data.gpt_dataset import Datasets
from megalite.data.loader import MicrobatchIterator
from megalite.data.microbatch import Microbatch
from megalite.distributed.mesh import Mesh
from megalite.training.state import TrainingState
from megalite.training.task import evaluates_whole, has_short_samples


class Feed:
    """Hands out microbatches, from where `state` is when they are first asked for."""

    def __init__(self, config: RunConfig, mesh: Mesh, datasets: Datasets, state: TrainingState):
        self.config, self.mesh, self.datasets, self.state = config, mesh, datasets, state
        self._iterators: dict[str, MicrobatchIterator] = {}

    def training(self) -> Iterator[Microbatch]:
        """The training set's, without end; none where there is no such set."""
        if self.datasets.train is None:
            return iter(())
        self._iterators["train"] = self._microbatches(self.datasets.train, start=self.state.consumed_samples)
        return self._iterators["train"]

    def evaluation(self, split: str) -> Iterator[Microbatch]:
        """Those of one evaluation on valid or test; successive ones go on where the last ended."""
        dataset = self.datasets.valid if split == "valid" else self.datasets.test
        if dataset is None:
            raise UserError(f"there is no {split} data to evaluate on")
        if evaluates_whole(self.config, len(dataset)):
            return self._whole(dataset)
        if split not in self._iterators:
            start = self.state.consumed_valid_samples if split == "valid" else 0
            self._iterators[split] = self._microbatches(dataset, start=start)
        count = self.config.validation.eval_iters * self.config.microbatches_per_step(self.mesh.dp.size)
        return itertools.islice(self._iterators[split], count)

    def close(self) -> None:
        """End the loader workers."""
        for iterator in self._iterators.values():
            iterator.close()

    def _whole(self, dataset: SampleSource) -> Iterator[Microbatch]:
        with self._microbatches(dataset, start=0, total=len(dataset)) as microbatches:
            yield from microbatches

    def _microbatches(self, dataset: SampleSource, *, start: int, total: int | None = None) -> MicrobatchIterator:
        training, data = self.config.training, self.config.data
        assert training.micro_batch_size is not None
        return MicrobatchIterator(
            dataset,
            start_sample=start,
            micro_batch_size=training.micro_batch_size,
            dp_rank=self.mesh.dp.rank,
            dp_size=self.mesh.dp.size,
            num_workers=data.num_workers,
            seed=training.seed,
            dataloader_type=data.dataloader_type or "single",
            total=total,
            trim_multiple=self._trim_multiple,
            pin_memory=self.mesh.device.type == "cuda",
        )

    @property
    def _trim_multiple(self) -> int | None:
        """What the length of a batch that is cut to its longest sample must be a multiple of; None: none is cut."""
        if not has_short_samples(self.config):
            return None
        return self.mesh.tp.size if self.mesh.layout.sequence_parallel else 1
