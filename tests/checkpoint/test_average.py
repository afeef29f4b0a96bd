"""The average of checkpoints: the mean in fp64, rounded once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalite.checkpoint import storage
from megalite.checkpoint.average import average
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.index import read_index
from megalite.checkpoint.rewrite import read_logical
from megalite.config.schema import PrecisionConfig
from megalite.nn.module import named_specs
from tests.checkpoint.logical import found
from tests.inference.checkpoints import save_tiny


@pytest.mark.parametrize("precision", [PrecisionConfig(), PrecisionConfig(bf16=True)], ids=["fp32", "bf16"])
def test_each_parameter_is_the_mean_rounded_once(precision: PrecisionConfig, tmp_path: Path) -> None:
    steps = (10, 20, 40)
    models = [save_tiny(tmp_path / "run", iteration=step, precision=precision) for step in (*steps, 50)][:3]
    (tmp_path / "run" / "huggingface").mkdir()
    (tmp_path / "run" / "huggingface" / "tokenizer.json").write_text("{}")
    assert average(tmp_path / "run", (40, 10, 20), tmp_path / "new") == tmp_path / "new" / "iter_0000040"
    result = found(tmp_path / "new")
    index = read_index(result)
    parameters = [{name: parameter.detach() for name, parameter, _ in named_specs(model)} for model in models]
    assert set(index.tensors) == {f"model.{name}" for name in parameters[0]}  # and no optimizer state
    for name, first in parameters[0].items():
        mean = torch.stack([one[name].double() for one in parameters]).sum(dim=0) / 3
        tensor = read_logical(result.path, index, f"model.{name}")
        assert tensor.dtype == first.dtype
        assert torch.equal(tensor, mean.to(first.dtype)), name
    for name in storage.DOCUMENTS:
        assert (result.path / name).read_bytes() == (tmp_path / "run" / "iter_0000040" / name).read_bytes()
    assert (tmp_path / "new" / "huggingface" / "tokenizer.json").read_text() == "{}"


def test_other_networks_and_missing_iterations_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    save_tiny(tmp_path / "run", iteration=10)
    save_tiny(tmp_path / "run", iteration=20, num_layers=3)
    with pytest.raises(CheckpointError, match=r"iter_0000010 and .*iter_0000020 hold different parameters:\n  model\."):
        average(tmp_path / "run", (10, 20), tmp_path / "new")
    with pytest.raises(CheckpointError, match="--ckpt-step 30: .*valid: 10, 20"):
        average(tmp_path / "run", (10, 30), tmp_path / "new")
    with pytest.raises(CheckpointError, match="nowhere"):
        average(tmp_path / "nowhere", (10, 30), tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
