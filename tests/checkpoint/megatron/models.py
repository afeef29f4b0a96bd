"""GPT models of megatron-core in this process, and their checkpoints as Megatron-LM's training writes them."""

from __future__ import annotations

import queue
import random
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

VOCABULARY, PADDED, LENGTH = 131, 160, 24

GPT2: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
LLAMA: dict[str, Any] = {
    **GPT2,
    "ffn_hidden_size": 48,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 10,
    "position_embedding_type": "rope",
    "rotary_base": 50000,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-4,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2, exact gelu": {**GPT2, "bias_gelu_fusion": False, "norm_epsilon": 1e-3},
    "llama": LLAMA,
    "llama, tied, part of a head rotated": {
        **LLAMA,
        "untie_embeddings_and_output_weights": False,
        "rotary_percent": 0.6,
        "rotary_interleaved": True,
        "add_qkv_bias": True,
        "qk_layernorm": True,
    },
    "squared relu, scaled positions": {
        **LLAMA,
        "swiglu": False,
        "squared_relu": True,
        "use_rope_scaling": True,
        "rope_scaling_factor": 4.0,
        "add_bias_linear": True,
    },
}


def arguments(case: str, **more: Any) -> Namespace:
    """What Megatron-LM keeps of a run, with some of what has no meaning for us."""
    from megatron.core.transformer.enums import AttnBackend

    values = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "num_query_groups": 1,
        "params_dtype": torch.float32,
        "attention_backend": AttnBackend.auto,
        "softmax_type": "vanilla",
        "num_experts": None,
        "moe_router_topk": 2,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCABULARY - 1,
        "padded_vocab_size": PADDED,
        "data_path": ["/nowhere/corpus"],
        "lr": 3e-4,
    }
    return Namespace(**values | CASES[case] | more)


@contextmanager
def one_rank() -> Iterator[None]:
    """The groups of megatron-core over this process alone, without CUDA."""
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        with no_cuda():
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def config_of(args: Namespace, **parallel: Any) -> Any:
    """The configuration that Megatron-LM's training makes of these arguments."""
    from megatron.core.activations import squared_relu
    from megatron.core.transformer import TransformerConfig

    def given(name: str, default: Any) -> Any:
        return getattr(args, name, default)

    bias, swiglu, squared = given("add_bias_linear", True), given("swiglu", False), given("squared_relu", False)
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=given("ffn_hidden_size", None),
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if given("group_query_attention", False) else None,
        kv_channels=given("kv_channels", None),
        normalization=given("normalization", "LayerNorm"),
        layernorm_epsilon=given("layernorm_epsilon", given("norm_epsilon", 1e-5)),
        add_bias_linear=bias,
        add_qkv_bias=given("add_qkv_bias", False) or bias,
        qk_layernorm=given("qk_layernorm", False),
        rotary_interleaved=given("rotary_interleaved", False),
        gated_linear_unit=swiglu,
        activation_func=F.silu if swiglu else squared_relu if squared else F.gelu,
        bias_activation_fusion=given("bias_gelu_fusion", True) and bias and not swiglu and not squared,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        **parallel,
    )


def model_of(args: Namespace, **stage: Any) -> Any:
    """A model of megatron-core by `args`, with random weights, vectors too."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = config_of(args, **stage.pop("parallel", {}))
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm),
        vocab_size=PADDED,
        max_sequence_length=LENGTH,
        position_embedding_type=getattr(args, "position_embedding_type", "learned_absolute"),
        rotary_base=getattr(args, "rotary_base", 10000),
        rotary_percent=getattr(args, "rotary_percent", 1.0),
        rope_scaling=getattr(args, "use_rope_scaling", False),
        rope_scaling_factor=getattr(args, "rope_scaling_factor", 8.0),
        share_embeddings_and_output_weights=not getattr(args, "untie_embeddings_and_output_weights", False),
        **stage,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.1 * torch.randn_like(parameter) if parameter.dim() == 1 else 0.05 * torch.randn_like(parameter)
            )
    return model.eval()


@torch.no_grad()
def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """[b, s, vocabulary] of a whole model of megatron-core, without padding."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)[None, None]
    result: Tensor = model(tokens, positions, mask)[..., :VOCABULARY]
    return result


@contextmanager
def no_cuda() -> Iterator[None]:
    """megatron-core asks CUDA for its device and generators, and moves tied tables to it."""
    with (
        patch("torch.cuda.current_device", return_value="cpu"),
        patch("torch.cuda.synchronize"),
        patch.object(Tensor, "cuda", lambda tensor: tensor),
        patch("megatron.core.tensor_parallel.get_cuda_rng_tracker", return_value=Namespace(fork=nullcontext)),
    ):
        yield


@contextmanager
def in_this_process() -> Iterator[None]:
    """megatron-core writes in other processes."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    writer = filesystem_async.FileSystemWriterAsync
    results: queue.Queue[Any] = queue.Queue()

    def write(transforms: Any, msc: bool, rank: int, buckets: Any, found: queue.Queue[Any]) -> None:
        written = {}
        for i, bucket in enumerate(buckets):
            one, count = queue.Queue[Any](), queue.Queue[int]()
            count.put(i)
            writer.write_preloaded_data(transforms, i, bucket, one, count, False)
            written[i] = one.get()[1]
        found.put(written)

    with (
        patch.object(filesystem_async, "_get_write_results_queue", lambda: results),
        patch.object(writer, "write_preloaded_data_multiproc", staticmethod(write)),
    ):
        yield


def save_torch_dist(root: Path, args: Namespace, model: Any, *, iteration: int = 7, **metadata: bool) -> Path:
    """As `--ckpt-format torch_dist`; the folder of the checkpoint."""
    from megatron.core import dist_checkpointing

    key = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    moment = dist_checkpointing.ShardedTensor.from_rank_offsets(key, torch.ones(args.hidden_size))
    folder = root / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "model": model.sharded_state_dict(metadata=metadata),
        "optimizer": {"state": moment},
        "rng_state": dist_checkpointing.mapping.ShardedObject("rng_state", [random.getstate()], (1,), (0,)),
    }
    with in_this_process():
        dist_checkpointing.save(content, str(folder))
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def column(name: str) -> bool:
    """Whether tensor-parallel ranks cut a tensor's first dimension."""
    return (
        name.endswith(("word_embeddings.weight", "output_layer.weight"))
        or "linear_qkv." in name
        or "linear_fc1." in name
    )


def cut(name: str, tensor: Tensor, rank: int, tp: int, swiglu: bool) -> Tensor:
    """A tensor-parallel rank's part, as its layers hold it."""
    if swiglu and "linear_fc1." in name:
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    if column(name):
        return tensor.chunk(tp)[rank].clone()
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(tp, dim=1)[rank].clone()
    return tensor


def save_ranks(root: Path, args: Namespace, model: Any, *, tp: int = 2, pp: int = 2, chunks: int = 1) -> Path:
    """As `--ckpt-format torch` at TP `tp`, PP `pp` with `chunks` of each rank; the folder of the checkpoint."""
    folder = root / "iter_0000007"
    args = Namespace(**vars(args) | {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp})
    stages = pp * chunks
    per_stage = args.num_layers // stages
    whole = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    tied = not getattr(args, "untie_embeddings_and_output_weights", False)
    if tied and stages > 1:
        whole["output_layer.weight"] = whole["embedding.word_embeddings.weight"]
    for rank in range(tp):
        for pipeline in range(pp):
            content: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
            content["optimizer"] = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-3}]}
            content["rng_state"] = [{"np_rng_state": np.random.RandomState(1).get_state()}]
            for chunk in range(chunks):
                stage = chunk * pp + pipeline
                mine = _of_stage(whole, stage, stages, per_stage)
                content["model" if chunks == 1 else f"model{chunk}"] = {
                    name: cut(name, tensor, rank, tp, getattr(args, "swiglu", False)) for name, tensor in mine.items()
                } | {"decoder.layers.0.self_attention.linear_proj._extra_state": None}
            path = folder / (f"mp_rank_{rank:02d}" + (f"_{pipeline:03d}" if pp > 1 else "")) / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            torch.save(content, path)
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def _of_stage(whole: dict[str, Tensor], stage: int, stages: int, per_stage: int) -> dict[str, Tensor]:
    """The tensors of a stage by the names that it has for them: its layers count from 0."""
    result = {}
    for name, tensor in whole.items():
        if name.startswith("decoder.layers."):
            number, _, rest = name.removeprefix("decoder.layers.").partition(".")
            if int(number) // per_stage == stage:
                result[f"decoder.layers.{int(number) % per_stage}.{rest}"] = tensor
        elif (stage == 0) if name.startswith("embedding.") else (stage == stages - 1):
            result[name] = tensor
    return result
