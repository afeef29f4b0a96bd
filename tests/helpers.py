"""Tiny models and specs as data, for tests of any room."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from megalite.checkpoint.checkpoint import plan, write_and_commit
from megalite.config.resolve import head_widths
from megalite.config.schema import ModelConfig, PrecisionConfig, RunConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.param_spec import ParamSpec
from megalite.distributed.pieces import Piece, whole
from megalite.files.remote import Place
from megalite.models.gpt import GPTStage
from megalite.models.stages import StageSpan, whole_model
from megalite.nn.attention_backend import AttentionBackend, choose_backend
from megalite.nn.module import Build, initialize, named_specs
from megalite.precision.policy import Precision

# Imported once for all processes of the tests; the second comes with any of torch's optimizers, the third with a run.
PRELOADED = ["megalite.training.pretrain", "torch._dynamo", "tests.e2e.runs"]
VOCABULARY = 131  # a prime, so that it never divides

FP64 = Precision.from_config(PrecisionConfig(fp64=True))
FP32 = Precision.from_config(PrecisionConfig())
BF16 = Precision.from_config(PrecisionConfig(bf16=True))
FP16 = Precision.from_config(PrecisionConfig(fp16=True))

UNFUSED = AttentionBackend("unfused", (), "test")
SDPA = AttentionBackend("sdpa", (), "test")


def save_checkpoint(root: Place, iteration: int, *, mesh: Mesh, **what: Any) -> Place:
    """Write `iter_...` in `root`; its folder. `what`: as for `checkpoint.plan`. Collective over the world."""
    return write_and_commit(plan(root, iteration, mesh=mesh, **what), mesh.world)


def tiny_config(**overrides: Any) -> ModelConfig:
    """A resolved network of 2 layers and 4 heads of 8, without dropout; `overrides` are fields of `ModelConfig`."""
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "make_vocab_size_divisible_by": 1,
        **overrides,
    }
    values.setdefault("ffn_hidden_size", 4 * values["hidden_size"])
    if values.get("multi_latent_attention"):
        values.setdefault("kv_channels", head_widths(ModelConfig(**values))[0])
    values.setdefault("kv_channels", values["hidden_size"] // values["num_attention_heads"])
    values.setdefault("group_query_attention", "num_query_groups" in values)
    values.setdefault("num_query_groups", values["num_attention_heads"])
    return ModelConfig(**values)


def set_fields(config: RunConfig, **values: Any) -> RunConfig:
    """`config` with fields of any section set."""
    for name, value in values.items():
        setattr(next(section for section in vars(config).values() if hasattr(section, name)), name, value)
    return config


LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 48,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "num_query_groups": 2,
}
"""Fields that turn `tiny_config` into a Llama."""
LATENT = {
    **LLAMA,
    "num_query_groups": 4,
    "group_query_attention": False,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
}
"""Fields that turn it into a DeepSeek in which all widths differ."""


def data_mesh(layout: Layout, rank: int) -> Mesh:
    """A rank of a layout without processes: good for building modules and reading specs, not for communication."""
    return Mesh(layout, rank, torch.device("cpu"), {})


def tiny_build(precision: Precision = FP64, mesh: Mesh | None = None, **overrides: Any) -> Build:
    """What blocks are built from: `tiny_config(**overrides)`, by default on one process."""
    return Build(tiny_config(**overrides), mesh or single_process_mesh(), precision)


def tiny_model(
    mesh: Mesh,
    precision: Precision,
    *,
    vocab_size: int = VOCABULARY,
    span: StageSpan | None = None,
    seed: int = 1234,
    **overrides: Any,
) -> GPTStage:
    """An initialised stage (default: the whole model) of `tiny_config(**overrides)`."""
    config = tiny_config(**overrides)
    run = RunConfig(model=config)
    if precision.compute is not precision.wide:
        run.precision.bf16 = True
    assert config.num_layers is not None
    backend = choose_backend(run, mesh.device.type)
    model = GPTStage(Build(config, mesh, precision), vocab_size, span or whole_model(config.num_layers), backend)
    initialize(model, seed)
    return model


def tiny_tokens(batch: int, length: int, *, vocab_size: int = VOCABULARY, seed: int = 0) -> Tensor:
    """Token ids [batch, length + 1]: inputs are all but the last, labels all but the first."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch, length + 1), generator=generator)


def assert_tiled(specs: Iterable[tuple[int, ParamSpec]]) -> None:
    """The boxes that the ranks of one replica own cover a logical parameter once, boxes lie inside their tensors, and
    all that hold a box agree on who does."""
    by_rank = list(specs)
    owned = torch.zeros(by_rank[0][1].shape, dtype=torch.int64)
    holders: dict[tuple[Any, Any], set[int]] = {}
    for rank, spec in by_rank:
        local = torch.empty(spec.local_shape)
        for box in spec.boxes:
            owned[box.global_slices] += box.owner == rank
            assert owned[box.global_slices].shape == local[box.local_slices].shape == box.shape
            holders.setdefault((box.global_start, box.shape), set()).add(rank)
    assert (owned == 1).all()
    for box in (box for _, spec in by_rank for box in spec.boxes):
        assert set(box.copies) == holders[box.global_start, box.shape] and box.owner in box.copies


def assemble(parts: Iterable[tuple[int, ParamSpec, Tensor]]) -> Tensor:
    """The logical tensor from the owned boxes of (rank, spec, local tensor) of every rank of one replica."""
    whole: Tensor | None = None
    for rank, spec, local in parts:
        if whole is None:
            whole = torch.full(spec.shape, float("nan"), dtype=local.dtype)
        for box in spec.boxes:
            if box.owner == rank:
                whole[box.global_slices] = local[box.local_slices]
    assert whole is not None
    return whole


NamedTensor = tuple[str, Tensor, ParamSpec]
"""(key, local tensor, spec)"""


def pieces_of(tensors: Iterable[NamedTensor]) -> list[Piece]:
    """(key, local tensor, spec) as pieces that are whole."""
    return [whole(*tensor) for tensor in tensors]


class FixedSink:
    """A gradient sink that is one tensor."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def target(self) -> Tensor:
        return self.tensor


def specs_and_values(model: nn.Module) -> dict[str, tuple[ParamSpec, Tensor]]:
    """Spec and value of every parameter, by global name."""
    return {name: (spec, parameter.detach()) for name, parameter, spec in named_specs(model)}


def load_tool(script: Path) -> ModuleType:
    """A script of `tools/` as a module, so that a test can call its `main`."""
    spec = importlib.util.spec_from_file_location(f"{script.stem}_tool", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def memory_of(statement: str, setup: str) -> tuple[str, int]:
    """What a statement prints in a fresh process, and by how many bytes it raises the peak of its memory."""
    peak = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss"
    code = f"import resource\n{setup}\nstart = {peak}\n{statement}\nprint({peak} - start)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    *printed, raised = done.stdout.splitlines()
    return "\n".join(printed), int(raised) * (1 if sys.platform == "darwin" else 1024)


def call_script(script: Path, *words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What comes of `python SCRIPT WORDS`, in a process forked from a server that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    argv, method = [str(script), *map(str, words)], multiprocessing.get_start_method()
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = context.Process(target=_run_script, args=(argv, cwd, out, err, method))
        process.start()
        process.join(100)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"{argv} did not end:\n{err.read_text()}")
        return subprocess.CompletedProcess(argv, process.exitcode, out.read_text(), err.read_text())


def _run_script(argv: list[str], cwd: Path | None, out: Path, err: Path, method: str) -> None:
    redirect(out, err)
    multiprocessing.set_start_method(method, force=True)  # what the script finds when started by hand
    os.chdir(cwd or os.curdir)
    sys.argv, sys.path[:0] = argv, [str(Path(argv[0]).parent)]
    runpy.run_path(argv[0], run_name="__main__")


def redirect(out: Path, err: Path) -> None:
    """Have this process write its standard output and error into files."""
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), descriptor)
