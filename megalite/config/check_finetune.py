"""Combinations of fine-tuning's flags that can't work."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megalite.config.fields import adapter_folders, all_fields, get, needs
from megalite.config.schema import RunConfig

_OTHER_SOURCES = ("mock_data", "data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path")


def finetune_problems(config: RunConfig) -> Iterator[str]:
    """A base model and a task with its data, and nothing that belongs to others."""
    yield from _base_problems(config)
    yield from _data_problems(config)
    finetune, fields = config.finetune, all_fields()
    task = finetune.task or ("lm" if finetune.sft_data is None else "sft")
    for needed, reason, names in (
        (finetune.sft_data is not None, "--sft-data", ["sft_valid_data", "sft_valid_share", "train_epochs"]),
        (task == "sft", "--task sft", ["sft_packing", "sft_long_answers", "chat_template"]),
        (task == "classification", "--task classification", ["class_names"]),
        (task != "classification", "--task sft or lm", ["eval_prompt"]),
    ):
        yield from needs(config, needed, reason, *(f"finetune.{name}" for name in names))
    yield from needs(config, finetune.sft_data is not None, "--sft-data", "tokenizer.parse_special_tokens")
    yield from _validation_problems(config)
    classes = finetune.class_names
    if classes is not None and (len(classes) < 2 or len(set(classes)) < len(classes)):
        yield f"{fields['finetune.class_names'].show(classes)}: two or more different names are needed"
    if finetune.train_epochs is not None:
        for name in ("train_iters", "train_samples"):
            if getattr(config.training, name) is not None:
                yield f"--train-epochs and --{name.replace('_', '-')} exclude each other: give only one"
        for name in ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples"):
            yield from needs(config, False, "--train-samples, but --train-epochs was given", f"learning_rate.{name}")
    if finetune.sft_valid_share and finetune.sft_valid_data:
        yield "--sft-valid-share and --sft-valid-data exclude each other"


def _validation_problems(config: RunConfig) -> Iterator[str]:
    """What is done at validations needs some."""
    finetune, peft = config.finetune, config.peft
    wanted = {
        "--eval-prompt": finetune.eval_prompt,
        "--save-best-adapter": peft.save_best_adapter,
        "--keep-best": config.checkpoint.keep_best,
    }
    for flag, value in wanted.items():
        if value is None:
            continue
        if finetune.sft_data is not None and not _validates(config):
            yield f"{flag} needs a validation set: give --sft-valid-data or --sft-valid-share"
        if config.validation.eval_iters == 0:
            yield f"{flag} needs evaluations, and --eval-iters is 0"
    folders = adapter_folders(config).values()
    if len({os.path.realpath(folder) for folder in folders}) < len(folders):
        yield f"--save-best-adapter {peft.save_best_adapter} is also the folder of --save-adapter: give another"


def _base_problems(config: RunConfig) -> Iterator[str]:
    if config.finetune.load_hf is None:
        yield from needs(config, False, "--load-hf", "finetune.hub", "finetune.ignore_config_field")
        return
    if config.model.preset is not None:
        yield f"--preset {config.model.preset} and --load-hf exclude each other: both define the network"
    if config.checkpoint.pretrained_checkpoint is not None:
        yield "--pretrained-checkpoint and --load-hf exclude each other: choose one source of weights"


def _data_problems(config: RunConfig) -> Iterator[str]:
    task, data = config.finetune.task, config.finetune.sft_data
    if data is None:
        if task in ("sft", "classification"):
            yield f"--task {task} needs --sft-data"
        return
    if config.validation.skip_train and not _validates(config) and config.peft.save_adapter is None:
        yield "--skip-train needs a validation set: give --sft-valid-data or --sft-valid-share"
    if task == "lm":
        yield "--task lm needs --data-path, not --sft-data; with --sft-data use --task sft or classification"
    fields = all_fields()
    for path in (f"data.{name}" for name in _OTHER_SOURCES):
        if get(config, path) != fields[path].default:
            yield f"{fields[path].option} and --sft-data exclude each other: choose one source of data"


def idle_beside_sft_data(config: RunConfig) -> Iterator[tuple[str, list[str]]]:
    """As `check.without_effect` needs it: what `--sft-data` makes meaningless."""
    if config.finetune.sft_data is None:
        return
    names = ["split", "mmap_bin_files", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"]
    yield "with --sft-data", [f"data.{name}" for name in names]
    if not _validates(config) and config.validation.eval_iters > 0:
        names = ["eval_interval", "full_validation"]
        yield "without --sft-valid-data or --sft-valid-share", [f"validation.{name}" for name in names]


def _validates(config: RunConfig) -> bool:
    return bool(config.finetune.sft_valid_data or config.finetune.sft_valid_share)
