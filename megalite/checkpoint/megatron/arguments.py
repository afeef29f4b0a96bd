"""The arguments of a run of Megatron-LM as a configuration of ours.

Key idea: our flags are Megatron-LM's. So its arguments are written as a command line of the flags that decide what the
network computes, and parsed as any command line; what it can't say is what can't be converted.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megalite.checkpoint.errors import CheckpointError
from megalite.config.check_network import model_problems
from megalite.config.errors import FlagError, UserError, listed
from megalite.config.fields import Field, section_fields, value_problems
from megalite.config.flags import build_parser, parse_namespace, read_run
from megalite.config.megatron_flags import current_flags, honoured_fields
from megalite.config.resolve import resolve
from megalite.config.schema import ModelConfig, RunConfig, TokenizerConfig
from megalite.config.schema_experts import ExpertFields
from megalite.config.schema_latent import LatentFields

_OTHER_NAMES = {"norm_epsilon": "layernorm_epsilon", "apply_layernorm_1p": "layernorm_zero_centered_gamma"}
"""Arguments whose name isn't that of their flag, in newer versions."""
_NOT_OF_A_NETWORK = {"attention_backend", "attention_softmax_in_fp32"}
_NOT_CONVERTED = {
    "num_experts": "experts",
    "multi_latent_attention": "multi-latent attention",
    "mtp_num_layers": "multi-token prediction",
}
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
_POSITIONS = ("learned_absolute", "rope", "none")
_ROTARY = ("rotary_", "rope_", "use_rope_")  # how the flags begin that other positions don't read
_OTHER_NETWORKS = {"other kinds of attention", "other kinds of positions", "layers that GPT does not have"}
_ALSO = {"--use-mup", "--rope-type"}
_HARMLESS = {"--qk-clip", "--use-kitchen-attention", "--decoder-seq-length"}  # of training, or of a kernel


def read_network(arguments: Namespace, where: str) -> ModelConfig:
    """The resolved network. `where`: the file, for messages.

    An argument that isn't there has its flag's default: older versions had fewer. A `CheckpointError` names all flags
    that can't be honoured.
    """
    missing = [name for name in _NEEDED if not isinstance(getattr(arguments, name, None), int)]
    if missing:
        raise CheckpointError(f"{where}: its args have no {', '.join(missing)}")
    problems = list(_problems(arguments))
    if problems:
        raise CheckpointError(f"{where} is of a network that can't be converted:{listed(problems)}")
    words = [word for field in _network_fields() for word in _words(field, _value(arguments, field))]
    try:
        namespace, _ = parse_namespace(build_parser("", "", ["model"]), words)
    except FlagError as error:
        raise CheckpointError(f"{where} has args that can't be honoured: {error}") from error
    config = read_run(namespace)
    described = [*value_problems(config)] or [*model_problems(config)]
    if described:
        raise CheckpointError(f"{where} describes an impossible network:{listed(described)}")
    return resolve(config, 1).model


def _network_fields() -> Iterator[Field]:
    others = {name for kind in (ExpertFields, LatentFields) for name in kind.__dataclass_fields__} | _NOT_OF_A_NETWORK
    for field in honoured_fields():
        if field.section == "model" and field.name not in others and not field.name.startswith("yarn_"):
            yield field


def _problems(arguments: Namespace) -> Iterator[str]:
    """What the network has and a conversion lacks, each as its flag."""
    for name, what in _NOT_CONVERTED.items():
        if getattr(arguments, name, None):
            yield f"--{name.replace('_', '-')}: {what} can't be converted"
    kind = _positions(arguments)
    if kind not in _POSITIONS:
        yield f"--position-embedding-type {kind}: only {', '.join(_POSITIONS)} can be converted"
    for flag in current_flags():
        name = flag.names[0]
        if name not in _HARMLESS and (flag.reason in _OTHER_NETWORKS or name in _ALSO):
            value = getattr(arguments, name.removeprefix("--").replace("-", "_"), None)
            values = [] if flag.nargs == 0 else [str(word) for word in (value if isinstance(value, list) else [value])]
            if value and flag.refuses(values):
                yield f"{' '.join([name, *values])}: {flag.reason}"


def _positions(arguments: Namespace) -> str:
    if getattr(arguments, "use_rotary_position_embeddings", False):
        return "rope"
    return str(getattr(arguments, "position_embedding_type", None) or "learned_absolute")


def _value(arguments: Namespace, field: Field) -> Any:
    """What an argument says that is a field of ours; None for its default."""
    name = field.name
    if name == "position_embedding_type":
        return _positions(arguments)
    if name == "num_query_groups" and not getattr(arguments, "group_query_attention", False):
        return None
    if name.startswith(_ROTARY) and _positions(arguments) != "rope":
        return None
    if name == "openai_gelu":
        return bool(getattr(arguments, name, False)) or _fused_gelu(arguments)
    value = getattr(arguments, name, None)
    if value is None and name in _OTHER_NAMES:
        value = getattr(arguments, _OTHER_NAMES[name], None)
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def _fused_gelu(arguments: Namespace) -> bool:
    """Whether bias and GELU are one kernel, Megatron-LM's default: that kernel computes the tanh approximation."""
    others = ("swiglu", "squared_relu")
    return (
        bool(getattr(arguments, "bias_gelu_fusion", True))
        and bool(getattr(arguments, "add_bias_linear", True))
        and not any(getattr(arguments, name, False) for name in others)
    )


def _words(field: Field, value: Any) -> list[str]:
    if value is None or value == field.default:
        return []
    return [field.option] if field.kind is bool else [field.option, str(value)]


def read_tokenizer(arguments: Namespace) -> tuple[TokenizerConfig, str | None]:
    """The tokenizer; with a note instead where we have no such one."""
    words = []
    for field in section_fields("tokenizer"):
        value = getattr(arguments, field.name, None)
        if (
            isinstance(value, str | int)
            and field.kind is not bool
            and (field.name != "vocab_size" or _is_null(arguments))
        ):
            words += _words(field, value)
    try:
        namespace, _ = parse_namespace(build_parser("", "", ["tokenizer"]), words)
    except UserError as error:
        return TokenizerConfig(), f"the tokenizer isn't taken over: {error}"
    return read_run(namespace).tokenizer, None


def _is_null(arguments: Namespace) -> bool:
    return getattr(arguments, "tokenizer_type", None) == "NullTokenizer"


def run_config(arguments: Namespace, where: str) -> tuple[RunConfig, list[str]]:
    """Network and tokenizer as a configuration; notes for the user."""
    tokenizer, note = read_tokenizer(arguments)
    return RunConfig(model=read_network(arguments, where), tokenizer=tokenizer), [note] if note else []
