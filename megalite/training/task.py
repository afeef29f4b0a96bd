"""What a run learns: next tokens of a corpus, answers, or labels. Which data that takes, and what is wrong with it.

Key idea: a task is its datasets and, for classification, its classes; samples of all tasks have one form, so the rest
of training doesn't know of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from megalite.config.errors import FlagError, UserError
from megalite.config.schema import RunConfig
from megalite.data.chat_forms import PAIR, form_of
from megalite.data.classification import build_classification_datasets, check_classification
from megalite.data.document_mask import SampleSource
from megalite.data.gpt_dataset import Datasets, SplitSummary, build_datasets
from megalite.data.jsonl import read_lines
from megalite.data.loader import MicrobatchIterator, microbatch_iterator
from megalite.data.microbatch import Microbatch
from megalite.data.sample_cache import SampleCache
from megalite.data.sft import SftOptions, SftReader, build_sft_datasets, check_sft
from megalite.data.splits import SPLITS, split_sizes
from megalite.data.tokenizer_base import Tokenizer
from megalite.data.tokenizers import require_eod
from megalite.distributed.mesh import Mesh
from megalite.optimizer.schedule import BatchSchedule
from megalite.training.evaluation import Prompts
from megalite.training.resume import TrainingState


def has_short_samples(config: RunConfig) -> bool:
    """Whether samples are shorter than a row, so that it pays to cut batches to their longest."""
    return config.finetune.task != "lm"


def sft_options(config: RunConfig) -> SftOptions:
    """The flags of a resolved configuration as `data/` takes them."""
    finetune = config.finetune
    return SftOptions(
        data=finetune.sft_data or [],
        seq_length=config.data.seq_length,
        seed=config.training.seed,
        valid_data=finetune.sft_valid_data or [],
        valid_share=finetune.sft_valid_share,
        packing=finetune.sft_packing,
        long_answers=finetune.sft_long_answers,
        chat_template=finetune.chat_template,
        cache=SampleCache(config.data.data_cache_path),
    )


def _template_place(config: RunConfig) -> str | None:
    """Where a chat template may lie: beside the tokenizer, or with the base model."""
    return config.tokenizer.tokenizer_model or config.finetune.load_hf


def check_task(config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """Problems that show at the first lines of the files, for the time before process groups exist."""
    if config.finetune.task == "sft":
        return check_sft(sft_options(config), tokenizer, _template_place(config))
    if config.finetune.task == "classification":
        return check_classification(sft_options(config), tokenizer, config.finetune.class_names)
    return []


def evaluation_prompts(config: RunConfig, tokenizer: Tokenizer) -> Prompts | None:
    """`--eval-prompt`, as this run teaches the model to be asked; None where it isn't given. Raises FlagError for a
    text that can't be asked."""
    texts, length = config.finetune.eval_prompt, config.data.seq_length
    if texts is None:
        return None
    try:
        reader, form, ends = SftReader(sft_options(config), tokenizer, _template_place(config)), PAIR, {tokenizer.eod}
        if config.finetune.task == "sft":
            form = form_of(next(iter(read_lines(reader.options.data[0], "--sft-data"))))
        if form != PAIR:
            ends.add(reader.chat.end_of_turn())
        ids = [reader.prompt(text, form) for text in texts]
    except UserError as error:
        raise FlagError(f"--eval-prompt: {error}") from error
    for text, prompt in zip(texts, ids, strict=True):
        if not 0 < len(prompt) < length:
            raise FlagError(
                f"--eval-prompt {text!r} has {len(prompt)} tokens, but needs at least 1 and below --seq-length {length}"
            )
    return Prompts(texts, ids, frozenset(each for each in ends if each is not None))


def evaluates_whole(config: RunConfig, samples: int) -> bool:
    """Whether each evaluation of a set of so many samples reads all of it, once: as asked, or since a set of answers or
    labels is small enough."""
    validation, batch = config.validation, config.training.global_batch_size
    return validation.full_validation or (has_short_samples(config) and validation.eval_iters * batch >= samples)


def _summed_up(summary: SplitSummary, config: RunConfig, sizes: tuple[int, int, int]) -> SplitSummary:
    """What a fine-tuning set gives to a run that draws `sizes`, counting that an evaluation may read it whole."""
    held, batch = summary.samples_per_epoch, config.training.global_batch_size
    drawn = sizes[SPLITS.index(summary.split)]
    whole = summary.split != "train" and evaluates_whole(config, held)
    if whole:
        drawn = drawn // (config.validation.eval_iters * batch) * held
    return replace(summary, samples=drawn, epochs=drawn / held, whole=whole)


def _settle_length(config: RunConfig, samples: int) -> None:
    """Set the steps that `--train-epochs` takes: so many that each sample is read at least that often. The last step
    is a whole global batch, filled up with samples of the next pass."""
    epochs, training, rate = config.finetune.train_epochs, config.training, config.learning_rate
    if epochs is None:
        return
    batches = BatchSchedule.from_config(config)
    steps = batches.iterations_for(epochs * samples)
    training.train_iters = steps + (batches.samples_after(steps) < epochs * samples)
    rate.lr_decay_iters = rate.lr_decay_iters or training.train_iters
    if rate.lr_warmup_iters >= rate.lr_decay_iters:
        raise UserError(
            f"--lr-warmup-iters {rate.lr_warmup_iters} must be below {rate.lr_decay_iters}, the steps over which the "
            f"learning rate decays (default: all steps of --train-epochs {epochs}, here {training.train_iters})"
        )


def _sizes(config: RunConfig) -> tuple[int, int, int]:
    """Samples that a run draws from train, valid and test."""
    batches = BatchSchedule.from_config(config)
    iterations = batches.total_iterations(config)
    return split_sizes(
        config,
        train_samples=batches.samples_after(iterations),
        train_iters=iterations,
        global_batch_size=config.training.global_batch_size,
    )


def build_task_datasets(config: RunConfig, tokenizer: Tokenizer) -> tuple[Datasets, tuple[str, ...] | None]:
    """The sets of a run; and the classes' names in order, None where it doesn't classify. Where `--train-epochs` says
    how long the run is, its number of steps is set in `config`. Raises UserError for data that can't be used."""
    if config.finetune.task == "lm":
        eod = require_eod(tokenizer, f"--tokenizer-type {config.tokenizer.tokenizer_type}")
        return _counted(build_datasets(config, eod, tokenizer.vocab_size, _sizes(config))), None
    options, classes = sft_options(config), None
    wanted = (int(not config.validation.skip_train), config.validation.eval_iters, 0)
    if config.finetune.task == "sft":
        datasets = build_sft_datasets(options, tokenizer, _template_place(config), wanted)
    else:
        names = config.finetune.class_names
        datasets, classes = build_classification_datasets(options, tokenizer, wanted, names)
    if datasets.train is not None:
        _settle_length(config, len(datasets.train))
    sizes = _sizes(config)
    datasets.summaries = [_summed_up(summary, config, sizes) for summary in datasets.summaries]
    return _counted(datasets), classes


def _counted(datasets: Datasets) -> Datasets:
    """Raise a UserError for a set without one token whose loss counts. Commonly the first sample answers."""
    for split in SPLITS:
        dataset: SampleSource | None = getattr(datasets, split)
        if dataset is not None and not any(dataset[index]["loss_mask"].any() for index in range(len(dataset))):
            raise UserError(
                f"{split}: no token of its {len(dataset)} samples counts for the loss, so there is nothing to learn or "
                "to measure: check what is masked (--eod-mask-loss, messages that aren't trained)"
            )
    return datasets


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
        return microbatch_iterator(
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
