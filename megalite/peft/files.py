"""An adapter's folder in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`; and beside them, where
PEFT has no place for them, the names of a classifier's classes.

Key idea: an adapter is small, so it is read whole, and everything that can be wrong with it is found from its own two
files before anything is built. What megalite can't do is refused by the name that PEFT gives it.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError, naming
from megalite.checkpoint.huggingface.architecture import CLASSIFIER
from megalite.checkpoint.huggingface.classes import labels_json, read_classes
from megalite.checkpoint.huggingface.hub import published_name
from megalite.checkpoint.huggingface.travel import TOKENIZER_FILES, to_json, write_small_files
from megalite.checkpoint.storage import ADAPTER_FILE as CONFIG_FILE
from megalite.checkpoint.storage import read_json, refuse_other_kind
from megalite.config.errors import UserError
from megalite.config.schema_finetune import PeftConfig
from megalite.files.atomic import replacing_together, together
from megalite.files.remote import Place, place

WEIGHTS_FILE = "adapter_model.safetensors"
CLASSES_FILE = "class_names.json"  # labels as in a model's own config.json; PEFT ignores this file
# Without the last a folder is no adapter, for PEFT too.
_WRITTEN = (*TOKENIZER_FILES, WEIGHTS_FILE, CLASSES_FILE, CONFIG_FILE)
_PICKLED = "adapter_model.bin"
KINDS = {"LORA": "lora", "PREFIX_TUNING": "prefix", "PROMPT_TUNING": "prompt"}
EMBEDDINGS = "prompt_embeddings"
PREFIX = "base_model.model."
SCORE = f"{PREFIX}score.weight"
_HEADS = ("score", "classifier")  # what PEFT saves of a classifier; a decoder's is called score

# Settings of PEFT that are honoured, or that say nothing of what a saved adapter computes. Whatever else is set (DoRA,
# an option of a later version) may change that, so it is refused.
_HONOURED = """
    peft_type task_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules exclude_modules
    layers_to_transform layers_pattern bias modules_to_save init_lora_weights fan_in_fan_out
    num_virtual_tokens num_transformer_submodules
"""
_INERT = """
    auto_mapping base_model_name_or_path corda_config ensure_weight_tying encoder_hidden_size eva_config inference_mode
    loftq_config lora_dropout lora_ga_config megatron_core num_attention_heads num_layers peft_version
    prefix_projection prompt_tuning_init prompt_tuning_init_text qalora_group_size revision runtime_config token_dim
    tokenizer_kwargs tokenizer_name_or_path
"""
_TABLES = ("lm_head", "embed_tokens", "wte")  # what architectures call them
_LONGEST = 1000  # characters of a pattern
_SECONDS = 5.0  # for all patterns: thousands of times what those of real adapters take
_KNOWN = frozenset((_HONOURED + _INERT).split())
_SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "bias": ((None, "none"), "only none is"),
    "init_lora_weights": (  # how the matrices started: pissa, olora and others are no start beside a frozen model
        (None, True, False, "gaussian", "eva", "orthogonal"),
        "it changes the model's own weights too; convert the adapter with PEFT's save_pretrained",
    ),
    "num_transformer_submodules": ((None, 1), "it must be 1, as in a decoder"),
    "use_rslora": ((None, False, True), "it must be true or false"),
}
"""The values of a setting that are supported, and why no others are."""


class Patterns:
    """Matches the patterns of one `adapter_config.json`, within a bound of processor time for all of them together.

    Whoever made the file chose them, and a few characters are enough to keep a matcher busy for years.
    """

    def __init__(self, path: Place):
        self.path, self.seconds = path, _SECONDS

    def fit(self, pattern: str, module: str) -> bool:
        """Whether a pattern fits the whole name of a module. A `CheckpointError` where time has run out."""
        begin = time.process_time()
        try:
            return regex.fullmatch(pattern, module, timeout=max(self.seconds, 1e-6)) is not None
        except TimeoutError:
            raise CheckpointError(
                f"{self.path}: matching its patterns takes too long; write module names instead of {pattern[:80]!r}"
            ) from None
        finally:
            self.seconds -= time.process_time() - begin


@dataclass(frozen=True)
class Adapter:
    """A folder's content. `kind`: lora, prefix or prompt."""

    where: Place
    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    patterns: Patterns

    def number(self, name: str) -> float:
        """A positive number of the configuration."""
        return _positive(self.config, name, self.where / CONFIG_FILE)

    def factor(self, module: str, rank: int) -> float:
        """What the product of the matrices beside a module, given by its full name, is multiplied by."""
        alpha = self._by_pattern("alpha_pattern", module, "lora_alpha")
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    def _by_pattern(self, patterns: str, module: str, usual: str) -> float:
        """A number of one module: of the first pattern that fits its name, else the usual one."""
        table = self.config.get(patterns) or {}
        found = next((table[key] for key in table if self.patterns.fit(rf"(.*\.)?({key})", module)), None)
        return self.number(usual) if found is None else found

    def targets(self, module: str) -> bool | None:
        """Whether the configuration puts matrices beside a module, given by its full name; None: it doesn't say."""
        wanted = self._matches("target_modules", module)
        layers, number = self.config.get("layers_to_transform"), re.search(r"\.(\d+)\.", module)
        if layers is not None and number is not None:
            wanted = wanted and int(number[1]) in (layers if isinstance(layers, list) else [layers])
        return wanted and not self._matches("exclude_modules", module)

    def _matches(self, field: str, module: str) -> bool | None:
        """Whether a list of names or a pattern means a module; None where there are none."""
        names = self.config.get(field)
        if not names or names == "all-linear":
            return None
        if isinstance(names, str):
            return self.patterns.fit(names, module)
        return any(f".{module}".endswith(f".{name}") for name in names)

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """LoRA's A [rank, in] and B [out, rank] by the full name of the module."""
        self._refuse_tables()
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_(A|B)\.weight", name)
            if match is None and name != SCORE:
                raise CheckpointError(f"{self.where / WEIGHTS_FILE}: {name} is not a LoRA weight of a linear layer")
            if match is not None:
                found.setdefault(match[1], {})[match[2]] = tensor
        for name, pair in found.items():
            a, b = pair.get("A"), pair.get("B")
            if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
                raise CheckpointError(f"{self.where / WEIGHTS_FILE}: {name} needs matrices A and B of the same rank")
            rank = self._by_pattern("rank_pattern", name, "r")
            if a.shape[0] != rank:
                raise CheckpointError(
                    f"{self.where / WEIGHTS_FILE}: {name} has matrices of rank {a.shape[0]}, but {CONFIG_FILE} says "
                    f"{rank:g}"
                )
        return {name: (pair["A"], pair["B"]) for name, pair in found.items()}

    def _refuse_tables(self) -> None:
        """Raise where the adapter changes the embedding of tokens or the output over them."""
        table = next((word for name in self.tensors for word in _TABLES if f".{word}." in name), None)
        if table is not None:
            raise CheckpointError(
                f"{self.where / WEIGHTS_FILE} has weights of {table}, a table over the vocabulary, which an adapter "
                f"can't change here. Train it without {table} in target_modules, or let PEFT add it to the model "
                "(merge_and_unload, then save_pretrained) and give that folder as --load-hf"
            )

    def embeddings(self) -> Tensor:
        """The vectors [n, width] of a prefix or prompt."""
        tensor = self.tensors.get(EMBEDDINGS)
        unknown = sorted(self.tensors.keys() - {EMBEDDINGS, SCORE})
        if unknown:
            raise CheckpointError(f"{self.where / WEIGHTS_FILE}: {unknown[0]} doesn't belong to a {self.kind} adapter")
        if tensor is None or tensor.ndim != 2 or tensor.shape[0] != self.number("num_virtual_tokens"):
            raise CheckpointError(
                f"{self.where / WEIGHTS_FILE} has no {EMBEDDINGS} of num_virtual_tokens = "
                f"{self.config.get('num_virtual_tokens')} rows"
            )
        return tensor


def read_adapter(directory: str | Place) -> Adapter:
    """An adapter's folder. A `CheckpointError` says which file is missing or damaged, or what is not supported."""
    where, config = _read_config(directory)
    path = where / WEIGHTS_FILE
    if not path.exists() and (where / _PICKLED).exists():
        raise CheckpointError(f"{where / _PICKLED} is a pickle, which megalite never reads: save it as {WEIGHTS_FILE}")
    with naming(path, SafetensorError):
        tensors = load_file(path) if isinstance(path, Path) else load(path.read_bytes())
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{path}: {name} is of {str(tensor.dtype).removeprefix('torch.')}, not floating-point"
            )
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{path}: {name} holds numbers that aren't finite")
    return Adapter(where, KINDS[config["peft_type"]], config, tensors, Patterns(where / CONFIG_FILE))


def _read_config(directory: str | Place) -> tuple[Place, dict[str, Any]]:
    """Where the adapter's files lie whole, and its configuration."""
    where = together(place(directory))
    path = where / CONFIG_FILE
    refuse_other_kind(where, "--adapter")
    if not path.is_file():
        raise CheckpointError(f"{where} holds no {CONFIG_FILE}: it is not the folder of an adapter in PEFT's format")
    config = read_json(path)
    kind = config.get("peft_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(f"{path}: peft_type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    for name in sorted(config.keys() - _KNOWN):
        if config[name]:
            raise CheckpointError(f"{path}: {name} {config[name]!r} is not supported")
    for name, (values, why) in _SUPPORTED.items():
        if config.get(name) not in values:
            raise CheckpointError(f"{path}: {name} {config[name]!r} is not supported: {why}")
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list) or any(name not in _HEADS for name in saved):
        raise CheckpointError(
            f"{path}: modules_to_save {saved!r} is not supported; only ['score'], a classifier's head, is"
        )
    _check_names(config, path)
    return where, config


def _check_names(config: Mapping[str, Any], path: Place) -> None:
    """Raise where names of modules, or patterns of them, are none."""
    for name in ("target_modules", "exclude_modules"):
        value = config.get(name)
        names = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(each, str) for each in names):
            raise CheckpointError(f"{path}: {name} must be a list of names or one pattern, not {value!r}")
        if isinstance(value, str):
            _check_pattern(value, name, path)
    for name in ("rank_pattern", "alpha_pattern"):
        table = config.get(name) or {}
        if not isinstance(table, dict):
            raise CheckpointError(f"{path}: {name} must be an object of names and numbers, not {table!r}")
        for key in table:
            _check_pattern(key, name, path)
            _positive(table, key, path)


def _check_pattern(pattern: str, name: str, path: Place) -> None:
    if len(pattern) > _LONGEST:
        raise CheckpointError(f"{path}: {name} is a pattern of {len(pattern)} characters; the limit is {_LONGEST}")
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise CheckpointError(f"{path}: {name} {pattern!r} is not a regular expression ({error})") from None


def _positive(config: Mapping[str, Any], name: str, path: Place, *, whole: bool = False) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"{path}: {name} must be a positive number, not {value!r}")
    if whole and value != int(value):
        raise CheckpointError(f"{path}: {name} must be a whole number, not {value!r}")
    return int(value) if whole else value


def adapter_settings(directory: str | Place) -> dict[str, Any]:
    """The fields of `PeftConfig` that an adapter's folder decides. Raises as `read_adapter`."""
    where, config = _read_config(directory)
    path, kind = where / CONFIG_FILE, KINDS[config["peft_type"]]
    if kind != "lora":
        return {"peft": kind, "num_virtual_tokens": _positive(config, "num_virtual_tokens", path, whole=True)}
    return {
        "peft": kind,
        "lora_rank": _positive(config, "r", path, whole=True),
        "lora_alpha": _positive(config, "lora_alpha", path),
        "use_rslora": bool(config.get("use_rslora")),
    }


def peft_config(directory: str | Place) -> PeftConfig:
    """The section `peft` of a run that does what an adapter's folder says. Raises as `read_adapter`."""
    return PeftConfig(load_adapter=str(directory), **adapter_settings(directory))


def base_note(directory: str | Place, model: str) -> str | None:
    """One line where an adapter's folder names another model than `model` as the one that it was trained beside."""
    name = _read_config(directory)[1].get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        return None
    trained, here = published_name(name), published_name(model)
    if Path(trained).resolve().name == Path(here).resolve().name:
        return None
    return (
        f"warning: the adapter {directory} was trained for {trained}, but is used with {here}: unless both are one "
        "model, answers will be wrong"
    )


def read_class_names(directory: str | Place) -> tuple[str, ...] | None:
    """The names of a classifier's classes in order; None where nobody wrote them. A `CheckpointError` where the file
    doesn't give each class a name."""
    path = together(place(directory)) / CLASSES_FILE
    return read_classes({**read_json(path), "architectures": [CLASSIFIER]}, str(path)) if path.exists() else None


def write_adapter(
    directory: str | Place,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    class_names: Sequence[str] | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Write the files of a folder, all or none of them. A `UserError` where that fails; an older adapter is then as it
    was. What else is in the folder stays.

    `beside`: small files of tokenizer, template and generation settings, by name; those of an older adapter go. Of
    several templates only the main one is kept there.
    """
    where = place(directory)
    files = {name: content for name, content in (beside or {}).items() if name in TOKENIZER_FILES}
    if class_names is not None:
        files[CLASSES_FILE] = to_json(labels_json(class_names))
    files[WEIGHTS_FILE] = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"})
    files[CONFIG_FILE] = to_json(config)
    try:
        with replacing_together(where, _WRITTEN) as folder:
            write_small_files(folder, files)
    except OSError as error:
        raise UserError(f"cannot write {where}: {error.strerror or error}") from None
