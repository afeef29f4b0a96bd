"""What a run learns: next tokens of a corpus, answers, or labels; and this rank's microbatches of its data.

Key idea: all that the tasks do differently is in one class each: which data they take, what is wrong with these, what
is measured beside the loss. Samples of all tasks have one form, so the rest of training doesn't know of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from megalite.config.errors import FlagError, UserError
from megalite.config.schema import RunConfig
from megalite.data.cache import SampleCache
from megalite.data.chat_forms import PAIR, form_of
from megalite.data.classification import build_classification_datasets, check_classification
from megalite.data.document_mask import SampleSource
from megalite.data.gpt_dataset import Datasets, SplitSummary, build_datasets
from megalite.data.jsonl import read_lines
from megalite.data.loader import MicrobatchIterator
from megalite.data.microbatch import Microbatch
from megalite.data.sft import SftOptions, SftReader, build_sft_datasets, check_sft
from megalite.data.splits import SPLITS, split_sizes
from megalite.data.tokenizer_base import Tokenizer
from megalite.data.tokenizers import require_eod
from megalite.distributed.mesh import Mesh
from megalite.optimizer.schedule import BatchSchedule
from megalite.training.evaluation import DecisionCounts, Prompts, length_multiple
from megalite.training.objective import TokenLoss
from megalite.training.resume import Progress


class Task:
    """Next tokens of a corpus (`--task lm`), and what all tasks share."""

    short_samples = False
    """Samples are shorter than a row, so that it pays to cut batches to their longest."""
    of_tokens = True
    """The loss is that of next tokens, so the tokenizer needs an end of document."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer):
        """`config`: resolved. `classes`: a classifier's, in order, once its data have been read."""
        self.config, self.tokenizer = config, tokenizer
        self.classes: tuple[str, ...] | None = None

    def problems(self) -> list[str]:
        """What shows at the first lines of the files, for the time before process groups exist."""
        return []

    def datasets(self) -> Datasets:
        """The sets of a run. Where `--train-epochs` says how long it is, its number of steps is set in the
        configuration. Raises UserError for data that can't be used."""
        datasets = self._read()
        for split in SPLITS:  # commonly the first sample answers
            dataset: SampleSource | None = getattr(datasets, split)
            if dataset is not None and not any(dataset[index]["loss_mask"].any() for index in range(len(dataset))):
                raise UserError(
                    f"{split}: no token of its {len(dataset)} samples counts for the loss, so there is nothing to "
                    "learn or to measure: check what is masked (--eod-mask-loss, messages that aren't trained)"
                )
        return datasets

    def objective(self) -> TokenLoss:
        """The loss and what it is divided by."""
        model = self.config.model
        return TokenLoss(model.label_smoothing, model.mtp_num_layers or 0, model.mtp_loss_scaling_factor)

    def decisions(self, mesh: Mesh) -> DecisionCounts | None:
        """What counts a classifier's decisions in evaluations; None where nothing is decided."""
        return None if self.classes is None else DecisionCounts(len(self.classes), mesh)

    def evaluates_whole(self, samples: int) -> bool:
        """Whether each evaluation of a set of so many samples reads all of it, once: as asked, or since a set of
        answers or labels is small enough."""
        validation, batch = self.config.validation, self.config.training.global_batch_size
        return validation.full_validation or (self.short_samples and validation.eval_iters * batch >= samples)

    def prompts(self) -> Prompts | None:
        """`--eval-prompt`, as this run teaches the model to be asked; None where it isn't given. Raises FlagError for a
        text that can't be asked."""
        texts, length = self.config.finetune.eval_prompt, self.config.data.seq_length
        if texts is None:
            return None
        try:
            reader, ends = SftReader(self._options(), self.tokenizer, self._template_place()), {self.tokenizer.eod}
            form = self._prompt_form()
            if form != PAIR:
                ends.add(reader.chat.end_of_turn())
            ids = [reader.prompt(text, form) for text in texts]
        except UserError as error:
            raise FlagError(f"--eval-prompt: {error}") from error
        for text, prompt in zip(texts, ids, strict=True):
            if not 0 < len(prompt) < length:
                raise FlagError(
                    f"--eval-prompt {text!r} has {len(prompt)} tokens, but needs at least 1 and below --seq-length "
                    f"{length}"
                )
        return Prompts(texts, ids, frozenset(each for each in ends if each is not None))

    def _read(self) -> Datasets:
        eod = require_eod(self.tokenizer, f"--tokenizer-type {self.config.tokenizer.tokenizer_type}")
        return build_datasets(self.config, eod, self.tokenizer.vocab_size, self._sizes())

    def _prompt_form(self) -> str:
        return PAIR

    def _sizes(self) -> tuple[int, int, int]:
        """Samples that the run draws from train, valid and test."""
        batches = BatchSchedule.from_config(self.config)
        iterations = batches.total_iterations(self.config)
        return split_sizes(
            self.config,
            train_samples=batches.samples_after(iterations),
            train_iters=iterations,
            global_batch_size=self.config.training.global_batch_size,
        )

    def _options(self) -> SftOptions:
        """The flags as `data/` takes them."""
        finetune = self.config.finetune
        return SftOptions(
            data=finetune.sft_data or [],
            seq_length=self.config.data.seq_length,
            seed=self.config.training.seed,
            valid_data=finetune.sft_valid_data or [],
            valid_share=finetune.sft_valid_share,
            packing=finetune.sft_packing,
            long_answers=finetune.sft_long_answers,
            chat_template=finetune.chat_template,
            cache=SampleCache(self.config.data.data_cache_path),
        )

    def _template_place(self) -> str | None:
        """Where a chat template may lie: beside the tokenizer, or with the base model."""
        return self.config.tokenizer.tokenizer_model or self.config.finetune.load_hf


class AnswerTask(Task):
    """Answers to prompts or in conversations (`--task sft`)."""

    short_samples = True

    def problems(self) -> list[str]:
        return check_sft(self._options(), self.tokenizer, self._template_place())

    def _read(self) -> Datasets:
        datasets = self._read_files((int(not self.config.validation.skip_train), self.config.validation.eval_iters, 0))
        if datasets.train is not None:
            self._set_length(len(datasets.train))
        sizes = self._sizes()
        datasets.summaries = [self._summarised(summary, sizes) for summary in datasets.summaries]
        return datasets

    def _read_files(self, sizes: tuple[int, int, int]) -> Datasets:
        return build_sft_datasets(self._options(), self.tokenizer, self._template_place(), sizes)

    def _prompt_form(self) -> str:
        return form_of(next(iter(read_lines(self._options().data[0], "--sft-data"))))

    def _set_length(self, samples: int) -> None:
        """Set the steps that `--train-epochs` takes: so many that each sample is read at least that often. The last
        step is a whole global batch, filled up with samples of the next pass."""
        training, rate, epochs = self.config.training, self.config.learning_rate, self.config.finetune.train_epochs
        if epochs is None:
            return
        batches = BatchSchedule.from_config(self.config)
        steps = batches.iterations_for(epochs * samples)
        training.train_iters = steps + (batches.samples_after(steps) < epochs * samples)
        rate.lr_decay_iters = rate.lr_decay_iters or training.train_iters
        if rate.lr_warmup_iters >= rate.lr_decay_iters:
            raise UserError(
                f"--lr-warmup-iters {rate.lr_warmup_iters} must be below {rate.lr_decay_iters}, the steps over which "
                f"the learning rate decays (default: all steps of --train-epochs {epochs}, here {training.train_iters})"
            )

    def _summarised(self, summary: SplitSummary, sizes: tuple[int, int, int]) -> SplitSummary:
        """What a set gives to a run that draws `sizes`, counting that an evaluation may read it whole."""
        held, drawn = summary.samples_per_epoch, sizes[SPLITS.index(summary.split)]
        whole = summary.split != "train" and self.evaluates_whole(held)
        if whole:
            drawn = drawn // (self.config.validation.eval_iters * self.config.training.global_batch_size) * held
        return replace(summary, samples=drawn, epochs=drawn / held, whole=whole)


class LabelTask(AnswerTask):
    """Labels of texts (`--task classification`)."""

    of_tokens = False

    def problems(self) -> list[str]:
        return check_classification(self._options(), self.tokenizer, self.config.finetune.class_names)

    def _read_files(self, sizes: tuple[int, int, int]) -> Datasets:
        names = self.config.finetune.class_names
        datasets, self.classes = build_classification_datasets(self._options(), self.tokenizer, sizes, names)
        self.config.finetune.class_names = list(self.classes)  # so that checkpoints know
        return datasets


TASKS: dict[str, type[Task]] = {"lm": Task, "sft": AnswerTask, "classification": LabelTask}


class Feed:
    """Hands out microbatches, from where `progress` is when they are first asked for."""

    def __init__(self, task: Task, mesh: Mesh, datasets: Datasets, progress: Progress):
        self.task, self.config, self.mesh, self.datasets, self.progress = task, task.config, mesh, datasets, progress
        self._iterators: dict[str, MicrobatchIterator] = {}

    def training(self) -> Iterator[Microbatch]:
        """The training set's, without end; none where there is no such set."""
        if self.datasets.train is None:
            return iter(())
        start, ahead = self.progress.next_sample, self.config.model.mtp_num_layers or 0
        self._iterators["train"] = self._microbatches(self.datasets.train, start=start, ahead=ahead)
        return self._parts(self._iterators["train"])

    def evaluation(self, split: str) -> Iterator[Microbatch]:
        """Those of one evaluation on valid or test; successive ones go on where the last ended."""
        dataset = self.datasets.valid if split == "valid" else self.datasets.test
        if dataset is None:
            raise UserError(f"there is no {split} data to evaluate on")
        if self.task.evaluates_whole(len(dataset)):
            return self._parts(self._whole(dataset))
        if split not in self._iterators:
            start = self.progress.state.consumed_valid_samples if split == "valid" else 0
            self._iterators[split] = self._microbatches(dataset, start=start)
        count = self.config.validation.eval_iters * self.config.microbatches_per_step(self.mesh.dp.size)
        return self._parts(itertools.islice(self._iterators[split], count))

    def close(self) -> None:
        """End the loader workers. What is asked for afterwards starts anew."""
        for iterator in self._iterators.values():
            iterator.close()
        self._iterators.clear()

    def _parts(self, microbatches: Iterator[Microbatch]) -> Iterator[Microbatch]:
        """This context-parallel rank's tokens of them."""
        return (batch.of_rank(self.mesh.cp) for batch in microbatches)

    def _whole(self, dataset: SampleSource) -> Iterator[Microbatch]:
        with self._microbatches(dataset, start=0, total=len(dataset)) as microbatches:
            yield from microbatches

    def _microbatches(
        self, dataset: SampleSource, *, start: int, total: int | None = None, ahead: int = 0
    ) -> MicrobatchIterator:
        training, data = self.config.training, self.config.data
        return MicrobatchIterator(
            dataset,
            start_sample=start,
            micro_batch_size=training.micro_batch_size,
            dp_rank=self.mesh.dp.rank,
            dp_size=self.mesh.dp.size,
            num_workers=data.num_workers,
            seed=training.seed,
            dataloader_type=data.dataloader_type,
            total=total,
            trim_multiple=self._trim_multiple,
            pin_memory=self.mesh.device.type == "cuda",
            ahead=ahead,
        )

    @property
    def _trim_multiple(self) -> int | None:
        """What the length of a batch that is cut to its longest sample must be a multiple of; None: none is cut."""
        return length_multiple(self.config, self.mesh) if self.task.short_samples else None
