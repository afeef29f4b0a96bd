"""What can't be converted is refused with one clear message, nothing is run and nothing is left."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.megatron.load import megatron_to_megalite
from megalite.models.whole import build_whole
from tests.checkpoint.megatron import models
from tests.inference.checkpoints import save_tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in both formats."""
    root = tmp_path_factory.mktemp("saved")
    with models.one_rank():
        args = models.arguments("llama", num_layers=2)
        model = models.model_of(args)
        models.save_torch_dist(root / "dist", args, model)
        models.save_ranks(root / "ranks", args, model)
    return root


class Hostile:
    """Runs a command where it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def refused(source: Path, tmp_path: Path, **options: Any) -> str:
    """The message; nothing is left of the attempt."""
    with pytest.raises(CheckpointError) as error:
        megatron_to_megalite(source, tmp_path / "run", build_whole, **options)
    assert not (tmp_path / "run").exists()
    return str(error.value)


def change(path: Path, function: Callable[[dict[str, Any]], object]) -> None:
    """Save a file again after a change of its content."""
    content = torch.load(path, weights_only=False)
    function(content)
    torch.save(content, path)


def test_hostile_pickles_run_nothing(saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for name, file in (("dist", "common.pt"), ("ranks", "mp_rank_01_001/model_optim_rng.pt")):
        shutil.copytree(saved / name, tmp_path / name)
        path = tmp_path / name / "iter_0000007" / file
        change(path, lambda content: content.update(more=Hostile(mark)))
        assert (
            refused(tmp_path / name, tmp_path)
            == f"{path} is not read: it would run posix.system, which no checkpoint needs"
        )
    shutil.copy(saved / "dist" / "iter_0000007" / "common.pt", tmp_path / "dist" / "iter_0000007")
    index = tmp_path / "dist" / "iter_0000007" / ".metadata"
    index.write_bytes(pickle.dumps(Hostile(mark)))
    assert "it refers to posix.system" in refused(tmp_path / "dist", tmp_path)
    assert not mark.exists()


def test_damaged_and_missing_files_are_named(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "all")
    ranks, dist = (tmp_path / "all" / name / "iter_0000007" for name in ("ranks", "dist"))
    shutil.rmtree(ranks / "mp_rank_01_000")
    message = refused(ranks, tmp_path)
    assert "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 and lacks\n  mp_rank_01_000" in message
    shutil.copytree(saved / "ranks" / "iter_0000007" / "mp_rank_01_000", ranks / "mp_rank_01_000")
    file = ranks / "mp_rank_00_001" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:3000])
    assert refused(ranks, tmp_path) == f"{file} is damaged, or was not written by Megatron-LM"
    file.unlink()
    assert refused(ranks, tmp_path) == f"{file}: No such file or directory"
    data = sorted(dist.glob("*.distcp"))[0]
    content = bytearray(data.read_bytes())
    data.write_bytes(content[:-5000])
    assert f"{data} is truncated" in refused(dist, tmp_path)
    content[content.index(b"data/0") + 200] ^= 1
    for at in range(0, len(content) - 64, 997):
        content[at] ^= 1
    data.write_bytes(content)
    assert str(data) in refused(dist, tmp_path)
    (dist / "common.pt").unlink()
    assert f"{dist / 'common.pt'} is missing" in refused(dist, tmp_path)
    (dist / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "is in the format zarr" in refused(dist, tmp_path)


@pytest.mark.parametrize(
    ("change_of", "message"),
    [
        ({"num_experts": 8}, "--num-experts: experts can't be converted"),
        ({"multi_latent_attention": True}, "--multi-latent-attention: "),
        ({"mtp_num_layers": 1}, "--mtp-num-layers: "),
        ({"position_embedding_type": "mrope"}, "--position-embedding-type mrope: only learned_absolute, rope, none"),
        (
            {"qk_l2_norm": True, "softmax_type": "learnable"},
            "--softmax-type learnable: other kinds of attention\n  --qk-l2",
        ),
        ({"spec": ["a.module", "spec"]}, "--spec a.module spec: layers that GPT does not have"),
        ({"use_mup": True}, "--use-mup"),
        ({"hidden_size": None}, "its args have no hidden_size"),
        ({"hidden_size": 30}, "holds tensors of another shape:"),
        ({"num_layers": 3}, "lacks\n  decoder.layers.2."),
        ({"num_layers": 1}, "holds tensors that a GPT with its args doesn't have:\n  decoder.layers.1."),
        ({"kv_channels": {"a": 1}}, "args that can't be honoured: --kv-channels"),
        ({"num_query_groups": 3}, "--num-query-groups 3 does not divide --num-attention-heads 4"),
        ({"untie_embeddings_and_output_weights": False}, "embedding and output are tied by its args, but output_layer"),
        ({"vocab_size": 200}, "the embedding has 160 rows, not 201"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_network_is_refused_by_name(
    change_of: dict[str, Any], message: str, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved / "dist", tmp_path / "dist")
    change(tmp_path / "dist" / "iter_0000007" / "common.pt", lambda content: vars(content["args"]).update(change_of))
    assert message in refused(tmp_path / "dist", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model", None, "holds no model"),
        ("args", None, "holds no args"),
        ("args", {"hidden_size": 32}, "holds no args"),
        ("checkpoint_version", 1.0, "checkpoint_version 1.0, whose queries, keys and values are in another order"),
        (
            "model",
            {"language_model": {"pooler": {"a": torch.ones(2)}}},
            "lacks embedding.word_embeddings.weight",
        ),
    ],
)
def test_files_without_what_is_needed_are_named(
    name: str, content: Any, message: str, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved / "ranks", tmp_path / "ranks")
    for path in tmp_path.glob("ranks/*/*/model_optim_rng.pt"):
        change(path, lambda values: values.pop(name) if content is None else values.update({name: content}))
    assert message in refused(tmp_path / "ranks", tmp_path)


def test_other_models_are_named_by_their_tensors(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "ranks", tmp_path / "ranks")
    for path in tmp_path.glob("ranks/*/*_001/model_optim_rng.pt"):
        change(path, lambda content: content["model"].update({"lm_head.dense.weight": torch.ones(4, 4)}))  # BERT's
    assert "that a GPT with its args doesn't have:\n  lm_head.dense.weight" in refused(tmp_path / "ranks", tmp_path)


def test_other_folders_are_told_apart(saved: Path, tmp_path: Path) -> None:
    assert "is not a folder" in refused(tmp_path / "nowhere", tmp_path)
    save_tiny(tmp_path / "ours")
    assert "is a checkpoint of megalite: it needs no conversion" in refused(tmp_path / "ours", tmp_path)
    assert "is a checkpoint of megalite" in refused(tmp_path / "ours" / "iter_0000010", tmp_path)
    assert "iter_0000009 is no checkpoint of Megatron-LM" in refused(saved / "dist", tmp_path, step=9)
    assert "in dist are iter_0000007" in refused(saved / "dist", tmp_path, step=9)
    assert "give its parent folder" in refused(saved / "dist" / "iter_0000007", tmp_path, step=7)
    (tmp_path / "empty").mkdir()
    assert "latest_checkpointed_iteration.txt: No such file" in refused(tmp_path / "empty", tmp_path)
    assert "the embedding has 160 rows, not 161" in refused(saved / "dist", tmp_path, vocab_size=161)
