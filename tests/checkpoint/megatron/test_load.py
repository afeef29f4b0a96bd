"""Checkpoints of Megatron-LM become ours: the logits are megatron-core's, the tensors bitwise the same."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.checkpoint import load_checkpoint, read_checkpoint_config
from megalite.checkpoint.index import read_index
from megalite.checkpoint.megatron.load import megatron_to_megalite
from megalite.checkpoint.rewrite import read_logical
from megalite.distributed.mesh import single_process_mesh
from megalite.distributed.pieces import whole
from megalite.models.whole import build_whole, outputs
from megalite.nn.module import named_specs
from tests.checkpoint.huggingface import folders
from tests.checkpoint.logical import found
from tests.checkpoint.megatron import models
from tests.checkpoint.megatron.models import CASES, LENGTH, VOCABULARY
from tests.helpers import load_tool


@pytest.fixture(scope="module", autouse=True)
def _groups() -> Iterator[None]:
    with models.one_rank():
        yield


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def converted(source: Path, root: Path) -> Tensor:
    """Logits of what a checkpoint becomes."""
    megatron_to_megalite(source, root, build_whole)
    checkpoint, mesh = found(root), single_process_mesh()
    config = read_checkpoint_config(checkpoint)
    assert config.model.model_vocab_size == VOCABULARY
    model = build_whole(config, VOCABULARY, mesh)
    pieces = [whole(f"model.{name}", parameter, spec) for name, parameter, spec in named_specs(model)]
    load_checkpoint(checkpoint, mesh=mesh, pieces=pieces)
    return outputs(model, tokens())


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    print(f"logits: largest difference {difference:.3g}, largest logit {largest:.3g}")
    assert difference < 2e-5
    assert largest > 0.3


@pytest.mark.parametrize("case", CASES)
def test_logits_of_both_formats_are_those_of_megatron_core(case: str, tmp_path: Path) -> None:
    args = models.arguments(case)
    model = models.model_of(args)
    theirs = models.logits_of(model, tokens())
    models.save_torch_dist(tmp_path / "dist", args, model)
    models.save_ranks(tmp_path / "ranks", args, model)
    assert_close(converted(tmp_path / "dist", tmp_path / "a"), theirs)
    assert_close(converted(tmp_path / "ranks", tmp_path / "b"), theirs)


def read(root: Path) -> dict[str, Tensor]:
    """The parameters of a checkpoint of ours."""
    checkpoint = found(root)
    index = read_index(checkpoint)
    return {key: read_logical(checkpoint.path, index, key) for key in index.tensors}


@pytest.mark.parametrize(("tp", "pp", "chunks"), [(1, 1, 1), (4, 1, 1), (1, 4, 1), (2, 2, 2)])
def test_every_layout_gives_the_same_bits(tp: int, pp: int, chunks: int, tmp_path: Path) -> None:
    args = models.arguments("llama", num_query_groups=4)
    model = models.model_of(args)
    models.save_torch_dist(tmp_path / "dist", args, model)
    models.save_ranks(tmp_path / "ranks", args, model, tp=tp, pp=pp, chunks=chunks)
    for name in ("dist", "ranks"):
        megatron_to_megalite(tmp_path / name, tmp_path / f"{name} run", build_whole)
    folders.assert_equal(read(tmp_path / "ranks run"), read(tmp_path / "dist run"))


def test_layers_and_halves_of_the_mlp_may_be_tensors_of_their_own(tmp_path: Path) -> None:
    args = models.arguments("llama")
    model = models.model_of(args)
    models.save_torch_dist(tmp_path / "one", args, model)
    models.save_torch_dist(tmp_path / "many", args, model, singleton_local_shards=True)
    for name in ("one", "many"):
        megatron_to_megalite(tmp_path / name, tmp_path / f"{name} run", build_whole)
    folders.assert_equal(read(tmp_path / "many run"), read(tmp_path / "one run"))


def old_names(content: dict[str, Any]) -> dict[str, Any]:
    """A rank's model as Megatron-LM kept it before megatron-core."""
    words = {"linear_qkv": "query_key_value", "linear_proj": "dense", "pre_mlp_layernorm": "post_attention_norm"}
    words |= {"linear_fc1": "dense_h_to_4h", "linear_fc2": "dense_4h_to_h", "input_layernorm": "input_norm"}
    model: dict[str, Any] = {"language_model": {"encoder": OrderedDict()}}
    parts = model["language_model"]
    for name, tensor in content.items():
        first, _, rest = name.partition(".")
        if first == "decoder":
            parts["encoder"][".".join(words.get(word, word) for word in rest.split("."))] = tensor
        elif first == "output_layer":
            model["word_embeddings_for_head"] = {"weight": tensor}
        else:
            table, _, kind = rest.partition(".")
            parts.setdefault("embedding", {})[table] = {kind: tensor}
    return model


def test_names_from_before_megatron_core_and_little_known_of_the_run(tmp_path: Path) -> None:
    args = models.arguments("gpt2")
    model = models.model_of(args)
    theirs = models.logits_of(model, tokens())
    folder = models.save_ranks(tmp_path / "ranks", args, model)
    kept = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
        "tokenizer_type",
        "vocab_size",
    )
    for path in folder.glob("*/model_optim_rng.pt"):
        content = torch.load(path, weights_only=False)
        content["args"] = Namespace(**{name: getattr(args, name) for name in kept})
        content["model"] = old_names(content["model"])
        torch.save(content, path)
    folder.rename(tmp_path / "ranks" / "release")
    (tmp_path / "ranks" / "latest_checkpointed_iteration.txt").write_text("release")
    assert_close(converted(tmp_path / "ranks", tmp_path / "run"), theirs)


def test_precision_tokenizer_and_rows_come_along(tmp_path: Path) -> None:
    args = models.arguments("llama", tokenizer_type="HuggingFaceTokenizer", tokenizer_model="/nowhere", vocab_size=None)
    model = models.model_of(args).bfloat16()
    folder = models.save_ranks(tmp_path / "ranks", args, model)
    notes = megatron_to_megalite(folder, tmp_path / "all", build_whole)
    assert notes[0].endswith("weights after iteration 7, without optimizer state")
    assert "all 160 rows of the embedding are kept" in notes[1]
    megatron_to_megalite(tmp_path / "ranks", tmp_path / "cut", build_whole, step=7, vocab_size=VOCABULARY)
    whole_table, cut_table = (
        read(tmp_path / name)["model.embedding.word_embeddings.weight"] for name in ("all", "cut")
    )
    assert torch.equal(whole_table, model.embedding.word_embeddings.weight)
    assert torch.equal(cut_table, whole_table[:VOCABULARY])
    config = read_checkpoint_config(found(tmp_path / "cut"))
    assert config.precision.bf16
    assert (config.tokenizer.tokenizer_type, config.tokenizer.tokenizer_model) == ("HuggingFaceTokenizer", "/nowhere")
    assert (config.model.model_vocab_size, config.model.norm_epsilon) == (VOCABULARY, 1e-4)


def test_the_tool_converts_a_run_and_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = models.arguments("llama")
    models.save_ranks(tmp_path / "theirs", args, models.model_of(args))
    tool = load_tool(Path(__file__).resolve().parents[3] / "tools" / "convert_checkpoint.py")
    words = ["--megatron", str(tmp_path / "theirs"), "--save", str(tmp_path / "ours"), "--ckpt-step", "7"]
    assert tool.main(["megatron-to-megalite", *words]) == 0
    there = f"{tmp_path}/ours/iter_0000000 = {tmp_path}/theirs/iter_0000007"
    assert capsys.readouterr().out == f"{there}: weights after iteration 7, without optimizer state\n"
    assert found(tmp_path / "ours").iteration == 0
