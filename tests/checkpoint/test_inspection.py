"""What is told of a checkpoint is what is in it, without reading it."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

from megalite.checkpoint.inspection import describe_checkpoint, network_line, report_lines
from megalite.checkpoint.storage import CheckpointDirectory
from megalite.config.schema import PrecisionConfig
from tests.checkpoint import logical
from tests.checkpoint.test_rewrite import saved
from tests.helpers import LATENT, LLAMA, tiny_config
from tests.inference.checkpoints import save_tiny


def without_data(source: CheckpointDirectory) -> CheckpointDirectory:
    """Its data files hold nothing any more, at their old size: who reads one finds out."""
    for file in source.path.glob("*.safetensors"):
        size = file.stat().st_size
        file.write_bytes(b"")
        with file.open("r+b") as opened:
            opened.truncate(size)
    return source


def test_every_parameter_is_told_and_no_tensor_read(tmp_path: Path) -> None:
    facts = describe_checkpoint(without_data(saved(tmp_path)))
    assert json.loads(json.dumps(facts)) == facts
    shapes = {key: shape for key, shape in logical.logical_shapes().items() if key.startswith("model.")}
    assert {f"model.{entry['name']}": tuple(entry["shape"]) for entry in facts["parameters"]} == shapes
    assert all(entry["number"] == prod(entry["shape"]) for entry in facts["parameters"])
    assert {entry["dtype"] for entry in facts["parameters"]} == {"bfloat16"}
    total = sum(map(prod, shapes.values()))
    assert (facts["total_parameters"], facts["parameter_bytes"]) == (total, 2 * total)
    state = {"tensors": len(shapes), "numbers": total, "bytes": 4 * total}
    assert facts["optimizer_state"] == {"exp_avg": state, "exp_avg_sq": state, "main": state}
    folder = tmp_path / "iter_0000007"
    assert facts["bytes_on_disk"] == sum(file.stat().st_size for file in folder.iterdir())
    assert facts["data_files"] == len(list(folder.glob("*.safetensors")))
    assert facts["iteration"] == 7


def test_people_read_each_parameter_in_the_order_of_the_layers(tmp_path: Path) -> None:
    save_tiny(tmp_path, precision=PrecisionConfig(bf16=True), num_layers=11)
    lines = list(report_lines(describe_checkpoint(logical.found(tmp_path))))
    text = "\n".join(lines)
    for expected in (
        "iteration 10: 0 samples, 0 tokens consumed",
        "network: 11 layers, hidden 32, 4 heads of 8, inner 128 GELU, LayerNorm, learned positions",
        "precision: bf16",
        "TP 1 x PP 1 x CP 1 x EP 1",
        "optimizer state exp_avg: ",
    ):
        assert expected in text
    numbers = [int(line.split(".")[2]) for line in lines if "decoder.layers." in line]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(11))
    (row,) = (line for line in lines if "layers.10.mlp.linear_fc1.weight" in line)
    assert row.split() == ["decoder.layers.10.mlp.linear_fc1.weight", "128", "x", "32", "bfloat16", "4,096"]


def test_experts_have_a_grid_of_their_own(tmp_path: Path) -> None:
    save_tiny(tmp_path, **LLAMA, num_experts=4, moe_ffn_hidden_size=12)
    lines = list(report_lines(describe_checkpoint(logical.found(tmp_path))))
    assert any("TP 1 x PP 1 x CP 1 x EP 1 x ETP 1, sharding" in line for line in lines)


def test_a_network_in_a_line() -> None:
    latent = network_line(tiny_config(**LATENT, mtp_num_layers=2), 131)
    assert "4 heads of 10 and 5 from 12 latent" in latent and "2 further tokens" in latent
    experts = {"num_experts": 8, "moe_ffn_hidden_size": 12, "moe_shared_expert_intermediate_size": 24}
    line = network_line(tiny_config(**LLAMA, **experts, moe_layer_freq="[0,1]"), 131)
    assert "8 experts in 1 layers, of inner 12, 2 a token and 24 shared" in line
    assert network_line(tiny_config(**LLAMA, window_size="9,0"), 131) == (
        "2 layers, hidden 32, 4 heads of 8 in 2 groups, inner 48 SwiGLU, RMSNorm, rotary base 10000, up to 64 "
        "positions, window 9,0, vocabulary 131, untied output"
    )
