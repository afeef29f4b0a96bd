"""What a run learns: next tokens of a corpus, answers, or labels. Which data that takes, and what is wrong with it.

Key idea: a task is its datasets and, for classification, its classes; samples of all tasks have one form, so the rest
of training doesn't know of it.
"""

from __future__ import annotations

from dataclasses import replace

from megalite.config.errors import UserError
from megalite.config.schema import RunConfig
from megalite.data.classification import build_classification_datasets, check_classification
from megalite.data.document_mask import SampleSource
from megalite.data.gpt_dataset import Datasets, SplitSummary, build_datasets
from megalite.data.sft import SftOptions, build_sft_datasets, check_sft
from megalite.data.tokenizer_base import Tokenizer
from megalite.data.tokenizers import require_eod


def has_short_samples(config: RunConfig) -> bool:
    """Whether samples are shorter than a row, so that it pays to cut batches to their longest."""
    return config.finetune.task != "lm"


def sft_options(config: RunConfig) -> SftOptions:
    """The flags of a resolved configuration as the data room takes them."""
    finetune = config.finetune
    assert config.data.seq_length is not None
    return SftOptions(
        data=finetune.sft_data or [],
        seq_length=config.data.seq_length,
        seed=config.training.seed,
        valid_data=finetune.sft_valid_data or [],
        valid_share=finetune.sft_valid_share,
        packing=finetune.sft_packing,
        long_answers=finetune.sft_long_answers,
        chat_template=finetune.chat_template,
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


def evaluates_whole(config: RunConfig, samples: int) -> bool:
    """Whether each evaluation of a set of so many samples reads all of it, once: as asked, or since a set of answers or
    labels is small enough."""
    validation, batch = config.validation, config.training.global_batch_size
    assert batch is not None
    return validation.full_validation or (has_short_samples(config) and validation.eval_iters * batch >= samples)


def _once_each(summary: SplitSummary, config: RunConfig, drawn: int) -> SplitSummary:
    """What a set gives to the run, counting that an evaluation may read it whole; `drawn`: if none did."""
    size, batch = summary.samples_per_epoch, config.training.global_batch_size
    assert batch is not None
    if summary.split == "train" or not evaluates_whole(config, size):
        return summary
    times = drawn // (config.validation.eval_iters * batch)
    return replace(summary, samples=times * size, epochs=float(times), whole=True)


def build_task_datasets(
    config: RunConfig, tokenizer: Tokenizer, sizes: tuple[int, int, int]
) -> tuple[Datasets, tuple[str, ...] | None]:
    """The sets of a run that draws `sizes` samples from train, valid and test; and the classes' names in order, None
    where it doesn't classify. Raises UserError for data that can't be used."""
    classes = None
    if config.finetune.task == "sft":
        datasets = build_sft_datasets(sft_options(config), tokenizer, _template_place(config), sizes)
    elif config.finetune.task == "classification":
        options, names = sft_options(config), config.finetune.class_names
        datasets, classes = build_classification_datasets(options, tokenizer, sizes, names)
    if config.finetune.task != "lm":
        datasets.summaries = [_once_each(summary, config, sizes[1]) for summary in datasets.summaries]
    else:
        eod = require_eod(tokenizer, f"--tokenizer-type {config.tokenizer.tokenizer_type}")
        datasets = build_datasets(config, eod, tokenizer.vocab_size, sizes)
    for split in ("train", "valid", "test"):
        _require_counted(split, getattr(datasets, split))
    return datasets, classes


def _require_counted(split: str, dataset: SampleSource | None) -> None:
    """Raise a UserError for a set without one token whose loss counts. Commonly the first sample answers."""
    if dataset is None or any(dataset[index]["loss_mask"].any() for index in range(len(dataset))):
        return
    raise UserError(
        f"{split}: no token of its {len(dataset)} samples counts for the loss, so there is nothing to learn or to "
        "measure: look at what is masked (--eod-mask-loss, messages that aren't trained)"
    )
