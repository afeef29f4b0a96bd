"""Checkpoints that four ranks of megatron-core write themselves, loaded by megatron-core at one rank, and by us."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.checkpoint.megatron.load import megatron_to_megalite
from megalite.distributed.pool import ProcessPool
from megalite.models.whole import build_whole
from tests.checkpoint.huggingface import folders
from tests.checkpoint.megatron import models
from tests.checkpoint.megatron.test_load import assert_close, converted, read, tokens


def _save(case: str, root: Path) -> None:
    """One rank's part of both formats at TP 2, PP 2."""
    from megatron.core import parallel_state

    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    args = models.arguments(case, **layout)
    parallel_state.initialize_model_parallel(**layout)
    try:
        with models.no_cuda():
            rank = parallel_state.get_tensor_model_parallel_rank()
            stage = parallel_state.get_pipeline_model_parallel_rank()
            torch.manual_seed(10 * stage)  # what is whole on each rank is the same
            parallel = {**layout, "pipeline_dtype": torch.float32}
            model = models.model_of(args, parallel=parallel, pre_process=stage == 0, post_process=stage == 1)
            if model.share_embeddings_and_output_weights:
                table = model.shared_embedding_or_output_weight().data.mul_(1 - stage)
                dist.all_reduce(table, group=parallel_state.get_embedding_group())
            content = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
            content["model"] = model.state_dict_for_save_checkpoint()
            folder = root / "ranks" / f"mp_rank_{rank:02d}_{stage:03d}"
            folder.mkdir(parents=True)
            torch.save(content, folder / "model_optim_rng.pt")
            models.save_torch_dist(root / "dist", args, model)
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_four_ranks_checkpoints_have_the_logits_of_megatron_core_at_one_rank(tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    with ProcessPool(4, preload=["megatron.core.models.gpt"]) as ranks:  # all of a world, which groups are made in
        for case in ("gpt2", "llama"):
            ranks.run(_save, 4, case, tmp_path / case, timeout=300.0)
    for case in ("gpt2", "llama"):
        root = tmp_path / case
        with models.one_rank():
            model = models.model_of(models.arguments(case))
            wanted = {"model": model.sharded_state_dict()}
            loaded = dist_checkpointing.load(wanted, str(root / "dist" / "iter_0000007"))
            model.load_state_dict(loaded["model"])
            theirs = models.logits_of(model, tokens())
        assert_close(converted(root / "dist", root / "a"), theirs)
        megatron_to_megalite(root / "ranks", root / "b", build_whole)
        folders.assert_equal(read(root / "b"), read(root / "a"))
