"""Initial weights are a function of seed, name and place alone: whatever the layout, the gathered model is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.distributed.layout import Layout
from megalite.distributed.mesh import single_process_mesh
from megalite.distributed.param_spec import ParamSpec
from megalite.models.stages import StageSpan
from tests.helpers import BF16, FP32, FP64, LLAMA, assemble, assert_tiled, data_mesh, specs_and_values, tiny_model

GPT2_LIKE: dict[str, Any] = {}
NETWORKS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2_LIKE,
    "padded vocabulary": {"make_vocab_size_divisible_by": 128},
    "llama": LLAMA,
    "qk layernorm": {**LLAMA, "qk_layernorm": True, "add_qkv_bias": True},
    "one group": {**LLAMA, "num_query_groups": 1, "num_attention_heads": 8, "add_bias_linear": True},
}
Parts = dict[str, list[tuple[int, ParamSpec, Tensor]]]


def gathered_parts(layout: Layout, spans: list[StageSpan], **overrides: Any) -> Parts:
    """Every parameter's (rank, spec, local value) over the ranks of one replica, without any process."""
    parts: Parts = {}
    for rank in layout.group_of(0, "pp", "tp"):
        mesh = data_mesh(layout, rank)
        model = tiny_model(mesh, FP32, span=spans[mesh.coordinates["pp"]], **overrides)
        for name, (spec, value) in specs_and_values(model).items():
            parts.setdefault(name, []).append((rank, spec, value))
    return parts


def check_equal_to_one_process(parts: Parts, **overrides: Any) -> None:
    whole = specs_and_values(tiny_model(single_process_mesh(), FP32, **overrides))
    assert whole.keys() == parts.keys()
    for name, (spec, value) in whole.items():
        assert_tiled((rank, part) for rank, part, _ in parts[name])
        (box,) = spec.boxes
        assert torch.equal(assemble(parts[name]), value[box.local_slices]), name
        for _, part, local in parts[name]:
            covered = torch.zeros(part.local_shape, dtype=torch.bool)
            for part_box in part.boxes:
                covered[part_box.local_slices] = True
                here = local[part_box.local_slices]
                assert torch.equal(here, value[box.local_slices][part_box.global_slices]), name
            assert (local[~covered] == 0).all(), f"{name}: padding isn't zero"


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_weights_gathered_over_tensor_parallel_ranks_are_those_of_one_process(network: str, tp: int) -> None:
    overrides = NETWORKS[network]
    parts = gathered_parts(Layout(tp=tp), [StageSpan(0, 2, True, True)], **overrides)
    check_equal_to_one_process(parts, **overrides)


def test_with_eight_ranks_and_two_groups_keys_and_values_are_copies_of_one_process() -> None:
    overrides = {**LLAMA, "num_attention_heads": 8, "kv_channels": 8}
    check_equal_to_one_process(gathered_parts(Layout(tp=8), [StageSpan(0, 2, True, True)], **overrides), **overrides)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_gathered_over_stages_are_those_of_one_process(tp: int, tied: bool) -> None:
    overrides = {"num_layers": 4, "untie_embeddings_and_output_weights": not tied}
    stages = (0, 3) if tied else None
    spans = [StageSpan(n, n + 1, n == 0, n == 3, stages) for n in range(4)]
    parts = gathered_parts(Layout(tp=tp, pp=4, dp=2), spans, **overrides)
    check_equal_to_one_process(parts, **overrides)
    holders = [rank for rank, _, _ in parts["embedding.word_embeddings.weight"]]
    replica = Layout(tp=tp, pp=4, dp=2).group_of(0, "pp", "tp")
    assert holders == [*replica[:tp], *(replica[-tp:] if tied else ())]


def test_layers_and_parameters_start_differently_and_with_the_deviation_asked_for() -> None:
    values = specs_and_values(tiny_model(single_process_mesh(), FP64, num_layers=4, init_method_std=0.1))
    weights = {name: value for name, (spec, value) in values.items() if spec.init.kind == "normal"}
    heads = [tuple(value.flatten()[:4].tolist()) for value in weights.values()]
    assert len(set(heads)) == len(heads)
    for name, value in weights.items():
        expected = 0.1 / 8**0.5 if "linear_proj" in name or "linear_fc2" in name else 0.1
        assert value.std().item() == pytest.approx(expected, rel=0.1), name


def test_another_seed_gives_other_weights() -> None:
    first, second = (specs_and_values(tiny_model(single_process_mesh(), FP32, seed=seed)) for seed in (1, 2))
    for name, (spec, value) in first.items():
        assert torch.equal(value, second[name][1]) == (spec.init.kind == "constant")


def test_every_precision_starts_from_the_fp32_numbers() -> None:
    wide = specs_and_values(tiny_model(single_process_mesh(), FP32))
    for precision in (BF16, FP64):
        for name, (_, value) in specs_and_values(tiny_model(single_process_mesh(), precision)).items():
            assert torch.equal(value, wide[name][1].to(precision.compute))


def test_norms_and_biases_do_not_decay_and_matrices_do() -> None:
    for name, (spec, _) in specs_and_values(tiny_model(single_process_mesh(), FP32)).items():
        assert spec.treatment.decays == (len(spec.shape) > 1 and not name.endswith("bias")), name
