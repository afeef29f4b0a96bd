"""From a command line to the configuration of a run, or to one message that says all that is wrong with it.

Precedence, lowest first: defaults, `--preset`, the checkpoint with `--use-checkpoint-args`, the command line.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalite.config.check import check, missing_fields, without_effect
from megalite.config.check_peft import contradiction
from megalite.config.errors import FlagError
from megalite.config.fields import Field, all_fields, get, put
from megalite.config.flags import parse_flags
from megalite.config.presets import preset_fields
from megalite.config.resolve import balancing, drop_idle, resolve
from megalite.config.schema import ROTARY, CheckpointConfig, ModelConfig, RunConfig, TokenizerConfig
from megalite.config.schema_experts import ONLY_TRAINING, ExpertFields
from megalite.config.schema_finetune import FinetuneConfig, unnamed_classes

# What `RunConfig.to_dict` wrote into the checkpoint that these flags choose; None where there is no checkpoint.
CheckpointConfigLoader = Callable[[CheckpointConfig], Mapping[str, Mapping[str, Any]] | None]

# Network and tokenizer of the folder that `--load-hf` names, the classes that it decides between, if it does, and notes
# for the user. A hub's name becomes the folder that the model was downloaded into.
BaseModelLoader = Callable[[FinetuneConfig], tuple[ModelConfig, TokenizerConfig, tuple[str, ...] | None, list[str]]]

# Fields of `PeftConfig` that the folder of `--load-adapter` decides.
AdapterLoader = Callable[[str], Mapping[str, Any]]


@dataclass(frozen=True)
class Loaders:
    """What reads the folders that flags name: for `--use-checkpoint-args`, `--load-hf`, `--load-adapter`. What is None
    isn't read."""

    checkpoint_config: CheckpointConfigLoader | None = None
    base_model: BaseModelLoader | None = None
    adapter: AdapterLoader | None = None


ACTIVATIONS = {"swiglu", "squared_relu", "openai_gelu"}
NOT_FROM_CHECKPOINT = {
    "preset",
    "attention_backend",
    "attention_softmax_in_fp32",
    "init_method_std",
    "label_smoothing",
    "moe_use_upcycling",  # how a run began
}
# What a pretrained network says, and the command line may say otherwise.
MAY_DIFFER = {"init_method_std", "hidden_dropout", "attention_dropout"}
# What it doesn't say.
NOT_FROM_BASE_MODEL = {
    "preset",
    "attention_backend",
    "attention_softmax_in_fp32",
    "label_smoothing",
    "make_vocab_size_divisible_by",
    *ONLY_TRAINING,
}
# What an upcycled model has beside the dense one.
_OF_EXPERTS = {f"model.{field.name}" for field in dataclasses.fields(ExpertFields)}

FEW = 2  # up to so many missing flags, each is a line of its own

_MOCK = (
    "--preset llama-tiny --seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 130"
)
SMALLEST = {
    "pretrain_gpt.py": f"python pretrain_gpt.py {_MOCK}",
    "finetune.py": (
        "python finetune.py --load-hf DIR --sft-data FILE.jsonl --peft lora --save-adapter DIR "
        "--seq-length 512 --micro-batch-size 4 --train-iters 100 --lr 1e-4"
    ),
    "verify_parallel.py": f"python tools/verify_parallel.py --tensor-model-parallel-size 2 {_MOCK}",
}
"""A command that works as it stands, by program; DIR and FILE are the user's."""


def refuse_few_flags(config: RunConfig, program: str) -> None:
    """A FlagError with the smallest command of `program`, where more than a few of the needed flags are missing."""
    missing = [field.option for field in missing_fields(config)]
    if len(missing) > FEW:
        raise FlagError(
            f"too few flags for a run: {', '.join(missing)} are missing. A small command that works:\n"
            f"  {SMALLEST.get(program, SMALLEST['pretrain_gpt.py'])}\n--help lists all flags"
        )


def read_config(
    argv: Sequence[str],
    program: str,
    description: str,
    world_size: int,
    *,
    sections: Sequence[str] | None = None,
    loaders: Loaders | None = None,
) -> tuple[RunConfig, list[str]]:
    """The resolved configuration of a run on `world_size` processes, and notes for the user, one line each.

    The notes say which flags are ignored or have no effect and what came from a checkpoint; rank 0 prints them. A
    FlagError holds all problems, one a line. `sections`: whose flags there are; None: those of pretraining.
    """
    config, explicit, notes = parse_flags(argv, program, description, sections)
    notes += fill(config, explicit, loaders or Loaders())
    refuse_few_flags(config, program)
    _, idle = drop_idle(config, world_size)
    problems = check(config, world_size)
    if problems:
        raise FlagError("\n".join(problems))
    return resolve(config, world_size), [*notes, *idle, *without_effect(config)]


def fill(config: RunConfig, explicit: Collection[str], loaders: Loaders) -> list[str]:
    """Set what the command line didn't give (`explicit`: what it did) and `--preset`, the folders of `--load-hf` and
    `--load-adapter` or a checkpoint know. Returns notes for the user; a FlagError says what is missing or
    contradicts."""
    fill_from_preset(config, explicit)
    notes: list[str] = []
    if config.finetune.load_hf is not None and loaders.base_model is not None:
        model, tokenizer, classes, notes = loaders.base_model(config.finetune)
        fill_from_base_model(config, model, tokenizer, classes, explicit)
    if config.peft.load_adapter is not None and loaders.adapter is not None:
        fill_from_adapter(config, loaders.adapter(config.peft.load_adapter), explicit)
    if config.checkpoint.use_checkpoint_args and (config.checkpoint.load or config.checkpoint.pretrained_checkpoint):
        notes = [*notes, *_load_and_fill(config, explicit, loaders.checkpoint_config)]
    return notes


def fill_from_preset(config: RunConfig, explicit: Collection[str]) -> None:
    """Set the network's fields that `--preset`, where given, knows and the command line didn't give.

    A FlagError lists the presets where there is no such one.
    """
    if config.model.preset is None:
        return
    given = {path.removeprefix("model.") for path in explicit}
    chose_activation = bool(given & ACTIVATIONS)
    for name, value in preset_fields(config.model.preset).items():
        if name not in given and not (chose_activation and name in ACTIVATIONS):
            setattr(config.model, name, copy.deepcopy(value))


def fill_from_base_model(
    config: RunConfig,
    model: ModelConfig,
    tokenizer: TokenizerConfig,
    classes: tuple[str, ...] | None,
    explicit: Collection[str],
) -> None:
    """Take network, tokenizer and classes from the folder that `--load-hf` names, where the command line doesn't say.

    A FlagError for flags that contradict the network. A tokenizer that the command line names replaces the folder's.
    """
    problems = [] if classes is None else _take_classes(config, classes)
    network = {f"model.{name}": value for name, value in vars(model).items() if name not in NOT_FROM_BASE_MODEL}
    if config.model.moe_use_upcycling:
        if model.num_experts is not None:
            source = f"--load-hf {config.finetune.load_hf}"
            problems.append(f"{source} has experts already: leave out --moe-use-upcycling, which needs a dense model")
        network = {path: value for path, value in network.items() if path not in _OF_EXPERTS}
    free = {f"model.{name}" for name in MAY_DIFFER}
    if model.position_embedding_type in ROTARY:
        free.add("model.max_position_embeddings")
    if model.num_experts is not None and "sinkhorn" in balancing(config.model):
        problems.append("--moe-router-load-balancing-type sinkhorn can't be used with --load-hf: it routes otherwise")
    for field, ours, theirs in _take(config, network, explicit):
        if field.path in explicit and field.path not in free:
            problems.append(
                f"{field.show(ours)} contradicts --load-hf {config.finetune.load_hf}, whose network has "
                f"{field.show(theirs)}: leave the flag out"
            )
    if problems:
        raise FlagError("\n".join(problems))
    kinds = {"tokenizer.tokenizer_type", "tokenizer.tokenizer_model", "tokenizer.vocab_file", "tokenizer.merge_file"}
    if not kinds & set(explicit):
        _take(config, {f"tokenizer.{name}": value for name, value in vars(tokenizer).items()}, explicit)


def _take(config: RunConfig, values: Mapping[str, Any], explicit: Collection[str]) -> list[tuple[Field, Any, Any]]:
    """Set the fields, by path, that the command line didn't give. Returns those whose value is another: the field, ours
    before and theirs."""
    fields = all_fields()
    others = [(fields[path], get(config, path), value) for path, value in values.items() if get(config, path) != value]
    for path in values.keys() - explicit:
        put(config, path, values[path])
    return others


def _take_classes(config: RunConfig, classes: tuple[str, ...]) -> list[str]:
    """The names of a classifier's classes, unless they are only numbered; what contradicts them."""
    finetune, theirs = config.finetune, list(classes)
    source = f"--load-hf {finetune.load_hf}"
    if finetune.task != "classification":
        return [f"{source} is a classifier ({', '.join(classes)}): give --task classification"]
    if theirs == unnamed_classes(len(theirs)):
        return []
    if finetune.class_names not in (None, theirs):
        return [
            f"--class-names {' '.join(finetune.class_names or [])} contradicts {source}, which has {' '.join(theirs)}"
        ]
    finetune.class_names = theirs
    return []


def fill_from_adapter(config: RunConfig, values: Mapping[str, Any], explicit: Collection[str]) -> None:
    """Take what the folder of `--load-adapter` says of the section `peft`. A FlagError for flags that say otherwise."""
    told = {f"peft.{name}": value for name, value in values.items()}
    folder = config.peft.load_adapter or ""
    problems = [
        contradiction(field.show(ours), folder, theirs)
        for field, ours, theirs in _take(config, told, explicit)
        if field.path in explicit
    ]
    if problems:
        raise FlagError("\n".join(problems))


def _load_and_fill(config: RunConfig, explicit: Collection[str], loader: CheckpointConfigLoader | None) -> list[str]:
    folder = config.checkpoint.load or config.checkpoint.pretrained_checkpoint
    if loader is None:
        raise FlagError("--use-checkpoint-args: this program doesn't read checkpoints")
    stored = loader(config.checkpoint)
    if stored is None:
        return [f"--use-checkpoint-args: no checkpoint in {folder} yet, so its flags are not used"]
    try:
        saved = RunConfig.from_dict({section: dict(values) for section, values in stored.items()})
    except ValueError as error:
        raise FlagError(f"--use-checkpoint-args: the checkpoint in {folder} is of another version: {error}") from error
    return fill_from_checkpoint(config, saved, explicit)


def fill_from_checkpoint(config: RunConfig, saved: RunConfig, explicit: Collection[str]) -> list[str]:
    """Take from a checkpoint's configuration what the command line didn't give of network, tokenizer and sequence
    length. Returns one line for each field that this changes, or that the command line changes against it."""
    fields = all_fields().values()
    network = [each.path for each in fields if each.section == "model" and each.name not in NOT_FROM_CHECKPOINT]
    tokenizer = [each.path for each in fields if each.section == "tokenizer"]
    values = {path: get(saved, path) for path in (*network, *tokenizer, "data.seq_length")}
    return [
        f"{field.show(ours)} replaces the checkpoint's {field.show(theirs)}"
        if field.path in explicit
        else f"{field.show(theirs)} comes from the checkpoint"
        for field, ours, theirs in _take(config, values, explicit)
    ]
