"""What a checkpoint holds, for people and for programs.

Key idea: index, configuration and training state say it all, and none of them is large. So no tensor is read, and a
checkpoint of a terabyte is described at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from megalite.checkpoint.checkpoint import read_checkpoint_config, read_training_state
from megalite.checkpoint.huggingface.architecture import HEAD
from megalite.checkpoint.huggingface.weights import EMBEDDING
from megalite.checkpoint.index import read_index
from megalite.checkpoint.planner import STATE_PREFIX
from megalite.checkpoint.storage import CheckpointDirectory
from megalite.checkpoint.stored import TensorInfo
from megalite.config.resolve import expert_layers, head_widths
from megalite.config.schema import ROTARY, ModelConfig, RunConfig
from megalite.files.remote import file_sizes
from megalite.precision.policy import Precision

_PREFIX = "model."
_SHORT = {"TP": "tensor_model", "PP": "pipeline_model", "CP": "context", "EP": "expert_model", "ETP": "expert_tensor"}
_COUNTERS = ("consumed_samples", "consumed_tokens", "skipped")
_LAYOUT = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "data_parallel_sharding_strategy",
)


def describe_checkpoint(source: CheckpointDirectory) -> dict[str, Any]:
    """All there is to know without its tensors, ready for JSON. `layout`: of the run that saved it, which whoever loads
    it need not have; data parallelism isn't recorded. Raises a `CheckpointError` for files that are missing or damaged.
    """
    index, config = read_index(source), read_checkpoint_config(source)
    training = read_training_state(source).get("training", {})
    tensors = index.tensors
    parameters = [
        {
            "name": key.removeprefix(_PREFIX),
            "shape": list(shape),
            "dtype": str(dtype).removeprefix("torch."),
            "number": prod(shape),
            "bytes": prod(shape) * dtype.itemsize,
        }
        for key, (shape, dtype) in tensors.items()
        if key.startswith(_PREFIX)
    ]
    rows = tensors[f"{_PREFIX}{EMBEDDING}"].shape[0] if f"{_PREFIX}{EMBEDDING}" in tensors else None
    task, peft = config.finetune.task or "lm", config.peft.peft
    return {
        "path": str(source.path),
        "iteration": source.iteration,
        **{name: int(training.get(name, 0)) for name in _COUNTERS},
        "network": network_line(config.model, rows, output=f"{_PREFIX}{HEAD}" not in tensors),
        "task": task if peft == "none" else f"{task}, --peft {peft}: only the adapter, not the frozen model",
        "classes": config.finetune.class_names,
        "precision": Precision.from_config(config.precision).name,
        "layout": _layout(config),
        "parameters": sorted(parameters, key=lambda entry: _numbered(entry["name"])),
        "optimizer_state": _optimizer_state(tensors),
        "total_parameters": sum(entry["number"] for entry in parameters),
        "parameter_bytes": sum(entry["bytes"] for entry in parameters),
        "data_files": len(index.files),
        "bytes_on_disk": sum(file_sizes(source.path).values()),
    }


def _layout(config: RunConfig) -> dict[str, Any]:
    """`expert_tensor_parallel_size`: None without experts."""
    layout, experts = config.layout, config.model.num_experts is not None
    tensor = layout.expert_tensor_parallel_size or layout.tensor_model_parallel_size
    values = {name: getattr(layout, name) for name in _LAYOUT}
    return {**values, "expert_tensor_parallel_size": tensor if experts else None}


def _numbered(name: str) -> list[tuple[int, str]]:
    """Sorts layer 10 behind layer 9."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]


def _optimizer_state(tensors: dict[str, TensorInfo]) -> dict[str, dict[str, int]]:
    """By kind: how many tensors, elements and bytes."""
    result: dict[str, dict[str, int]] = {}
    for key, info in tensors.items():
        if key.startswith(STATE_PREFIX):
            kind = key.removeprefix(STATE_PREFIX).partition(".")[0]
            sums = result.setdefault(kind, {"tensors": 0, "numbers": 0, "bytes": 0})
            sums["tensors"] += 1
            sums["numbers"] += prod(info.shape)
            sums["bytes"] += prod(info.shape) * info.dtype.itemsize
    return result


def network_line(model: ModelConfig, rows: int | None, *, output: bool = True) -> str:
    """A network in a line. `rows`: of its embedding, where it has one here. `output`: over the vocabulary."""
    groups = f" in {model.num_query_groups} groups" if model.group_query_attention else ""
    heads = f"{model.num_attention_heads} heads of {model.kv_channels}{groups}"
    if model.multi_latent_attention:
        queries, values = head_widths(model)
        heads = f"{model.num_attention_heads} heads of {queries} and {values} from {model.kv_lora_rank} latent"
    kinds = {"SwiGLU": model.swiglu, "squared ReLU": model.squared_relu, "tanh GELU": model.openai_gelu, "GELU": True}
    positions = {"learned_absolute": "learned positions"}.get(model.position_embedding_type, "no positions")
    if model.position_embedding_type in ROTARY:
        scaling = "" if model.position_embedding_type == "rope" else f" with {model.position_embedding_type}"
        positions = f"rotary base {model.rotary_base:g}{scaling}"
    parts = [
        f"{model.num_layers} layers",
        f"hidden {model.hidden_size}",
        heads,
        f"inner {model.ffn_hidden_size} {next(kind for kind, it_is in kinds.items() if it_is)}",
        model.normalization,
        positions,
        f"up to {model.max_position_embeddings} positions" if model.max_position_embeddings else "",
        f"window {model.window_size}" if model.window_size else "",
        _experts(model),
        f"{model.mtp_num_layers} further tokens" if model.mtp_num_layers else "",
        f"vocabulary {rows}" if rows else "",
        "" if not output else "untied output" if model.untie_embeddings_and_output_weights else "tied output",
    ]
    return ", ".join(part for part in parts if part)


def _experts(model: ModelConfig) -> str:
    if model.num_experts is None:
        return ""
    layers, shared = expert_layers(model), model.moe_shared_expert_intermediate_size
    where = "" if all(layers) else f" in {sum(layers)} layers"
    beside = f" and {shared} shared" if shared else ""
    number, inner = model.num_experts, model.moe_ffn_hidden_size
    return f"{number} experts{where}, of inner {inner}, {model.moe_router_topk} a token{beside}"


def report_lines(facts: dict[str, Any]) -> Iterator[str]:
    """What `describe_checkpoint` found, as lines for people."""
    layout = facts["layout"]
    sizes = {name: layout[f"{long}_parallel_size"] for name, long in _SHORT.items()}
    saved_at = [" x ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)]
    saved_at += ["sequence parallel"] if layout["sequence_parallel"] else []
    saved_at += [f"sharding {layout['data_parallel_sharding_strategy'] or 'no_shard'}"]
    yield facts["path"]
    yield (
        f"iteration {facts['iteration']:,}: {facts['consumed_samples']:,} samples, {facts['consumed_tokens']:,} tokens "
        f"consumed, {facts['skipped']:,} steps skipped"
    )
    yield f"network: {facts['network']}"
    yield f"task: {facts['task']}" + (f"; classes: {', '.join(facts['classes'])}" if facts["classes"] else "")
    yield f"precision: {facts['precision']}"
    yield f"saved at {', '.join(saved_at)}; loads at any layout"
    tensors = f"{len(facts['parameters']):,} tensors, {facts['parameter_bytes']:,} bytes"
    yield f"parameters: {facts['total_parameters']:,} in {tensors}"
    yield from _table(facts["parameters"])
    for kind, sums in facts["optimizer_state"].items():
        counts = ", ".join(f"{count:,} {what}" for what, count in sums.items())
        yield f"optimizer state {kind}: {counts}"
    if not facts["optimizer_state"]:
        yield "no optimizer state"
    yield f"on disk: {facts['bytes_on_disk']:,} bytes, tensors in {facts['data_files']:,} files"


def _table(entries: list[dict[str, Any]]) -> Iterator[str]:
    """Name, shape, format and number of each, in columns."""
    rows = [
        (entry["name"], " x ".join(map(str, entry["shape"])), entry["dtype"], f"{entry['number']:,}")
        for entry in entries
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, shape, dtype, number in rows:
        yield f"  {name:{widths[0]}}  {shape:{widths[1]}}  {dtype:{widths[2]}}  {number:>{widths[3]}}"
