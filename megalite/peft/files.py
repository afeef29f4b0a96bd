"""An adapter's folder in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Key idea: an adapter is small, so it is read whole, and everything that can be wrong with it is found from its own two
files before anything is built. What megalite can't do is refused by the name that PEFT gives it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError, reason
from megalite.checkpoint.storage import read_json
from megalite.config.errors import FlagError
from megalite.config.schema_peft import PeftConfig
from megalite.data.files import replacing

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
KINDS = {"LORA": "lora", "PREFIX_TUNING": "prefix", "PROMPT_TUNING": "prompt"}
EMBEDDINGS = "prompt_embeddings"
PREFIX = "base_model.model."
SCORE = f"{PREFIX}score.weight"

# Settings of PEFT that change what an adapter computes; off in what is read and written here.
_OFF = (
    "use_dora",
    "lora_bias",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "velora_config",
    "monteclora_config",
    "arrow_config",
    "kasa_config",
)


@dataclass(frozen=True)
class Adapter:
    """A folder's content. `kind`: lora, prefix or prompt."""

    where: Path
    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def number(self, name: str) -> float:
        """A positive number of the configuration."""
        return _positive(self.config, name, self.where / CONFIG_FILE)

    def factor(self, module: str, rank: int) -> float:
        """What the product of the matrices beside a module, given by its full name, is multiplied by."""
        patterns = self.config.get("alpha_pattern") or {}
        alpha = next((a for key, a in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), None)
        alpha = self.number("lora_alpha") if alpha is None else alpha
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """LoRA's A [rank, in] and B [out, rank] by the full name of the module."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_(A|B)\.weight", name)
            if match is None and name != SCORE:
                raise CheckpointError(f"{self.where / WEIGHTS_FILE}: {name} is no weight of a linear layer's LoRA")
            if match is not None:
                found.setdefault(match[1], {})[match[2]] = tensor
        for name, pair in found.items():
            a, b = pair.get("A"), pair.get("B")
            if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
                raise CheckpointError(f"{self.where / WEIGHTS_FILE}: {name} has no matrices A and B of one rank")
        return {name: (pair["A"], pair["B"]) for name, pair in found.items()}

    def embeddings(self) -> Tensor:
        """The vectors [n, width] of a prefix or prompt."""
        tensor = self.tensors.get(EMBEDDINGS)
        if tensor is None or tensor.ndim != 2 or tensor.shape[0] != self.number("num_virtual_tokens"):
            raise CheckpointError(
                f"{self.where / WEIGHTS_FILE} has no {EMBEDDINGS} of num_virtual_tokens = "
                f"{self.config.get('num_virtual_tokens')} rows"
            )
        return tensor


def read_adapter(directory: str | Path) -> Adapter:
    """An adapter's folder. A `CheckpointError` says which file is missing or damaged, or what is not supported."""
    where = Path(directory)
    config = _read_config(where)
    path = where / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {reason(error)}") from error
    return Adapter(where, KINDS[config["peft_type"]], config, tensors)


def _read_config(where: Path) -> dict[str, Any]:
    path = where / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(f"{where} holds no {CONFIG_FILE}: it is no folder of an adapter in PEFT's format")
    config = read_json(path)
    if config.get("peft_type") not in KINDS:
        kinds = ", ".join(KINDS)
        raise CheckpointError(f"{path}: peft_type {config.get('peft_type')!r} is not supported; there are {kinds}")
    for name in _OFF:
        if config.get(name):
            raise CheckpointError(f"{path}: {name} {config[name]!r} is not supported")
    if config.get("bias") not in (None, "none"):
        raise CheckpointError(f"{path}: bias {config['bias']!r} is not supported; only none is")
    saved = config.get("modules_to_save") or []
    if set(saved) - {"score"}:
        raise CheckpointError(
            f"{path}: modules_to_save {saved!r} is not supported; only score, a classifier's head, is"
        )
    if config.get("num_transformer_submodules") not in (None, 1):
        raise CheckpointError(f"{path}: num_transformer_submodules must be 1, as in a decoder")
    return config


def _positive(config: Mapping[str, Any], name: str, path: Path) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"{path}: {name} is {value!r}, not a positive number")
    return value


def settle(peft: PeftConfig) -> PeftConfig:
    """`peft` with what the folder of `--load-adapter` says; itself where none is given.

    A `FlagError` where a flag was given that says something else.
    """
    if peft.load_adapter is None:
        return peft
    where = Path(peft.load_adapter)
    config = _read_config(where)
    kind = KINDS[config["peft_type"]]
    told: dict[str, Any] = {"peft": kind}
    if kind == "lora":
        told["lora_rank"] = int(_positive(config, "r", where / CONFIG_FILE))
        told["lora_alpha"] = _positive(config, "lora_alpha", where / CONFIG_FILE)
        told["use_rslora"] = bool(config.get("use_rslora"))
    else:
        told["num_virtual_tokens"] = int(_positive(config, "num_virtual_tokens", where / CONFIG_FILE))
    default = PeftConfig()
    for name, value in told.items():
        given = getattr(peft, name)
        if given not in (getattr(default, name), value):
            flag = "--" + name.replace("_", "-")
            raise FlagError(f"{flag} {given}: --load-adapter {peft.load_adapter} has {value}; leave the flag out")
    return replace(peft, **told)


def write_adapter(directory: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write both files of a folder, each whole or not at all. A `UserError` where that fails."""
    where = Path(directory)
    with replacing(str(where / WEIGHTS_FILE)) as stream:
        stream.write(save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"}))
    with replacing(str(where / CONFIG_FILE)) as stream:
        stream.write((json.dumps(config, indent=2) + "\n").encode())
