"""Predicted bytes of activations against the paper's formulas and against what a step really holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config.resolve import resolve
from megalite.config.schema import RunConfig
from megalite.data.microbatch import Microbatch, with_ahead
from megalite.distributed.layout import Layout
from megalite.estimate.activations import chunk_activations
from megalite.models.gpt import GPTStage
from megalite.models.stages import stage_spans
from megalite.nn.attention_backend import choose_backend
from megalite.nn.module import Build, initialize, specs_of
from megalite.nn.recompute import Recompute
from megalite.pipeline.lowering import COMMUNICATION
from megalite.pipeline.schedules import BACKWARD_WEIGHT, FORWARD
from megalite.precision.fp8 import Fp8
from megalite.training.executor import HIDDEN, GPTExecutor, LoweredSchedules
from megalite.training.memory import PeakMemory
from megalite.training.objective import TokenLoss
from megalite.training.report import predicted_memory
from tests.helpers import FP32, LATENT, LLAMA, VOCABULARY, FixedSink, data_mesh, set_fields, tiny_config, tiny_tokens

LENGTH, MICROBATCHES = 64, 4


def config_of(network: dict[str, Any], **settings: Any) -> RunConfig:
    """Resolved, of 8 layers; `settings`: fields of the layout or of training."""
    config = RunConfig(model=tiny_config(num_layers=8, hidden_size=64, **network))
    config.data.seq_length, config.data.mock_data = LENGTH, True
    config.training.micro_batch_size, config.training.global_batch_size = 2, 2 * MICROBATCHES
    config.training.train_iters, config.learning_rate.lr = 1, 1e-3
    return resolve(
        set_fields(config, **settings),
        config.layout.tensor_model_parallel_size * config.layout.pipeline_model_parallel_size,
    )


def step_of(config: RunConfig, rank: int) -> tuple[int, int]:
    """(predicted, measured) bytes of activations of one pipeline rank, alone: what others would send is made up."""
    mesh = data_mesh(Layout(pp=config.layout.pipeline_model_parallel_size), rank)
    precision = replace(FP32, fp8=Fp8.from_config(config.precision, mesh.device))
    build = Build(config.model, mesh, precision, recompute=Recompute.from_config(config.training))
    backend = choose_backend(config, "cpu")
    stages = [GPTStage(build, VOCABULARY, span, backend) for span in stage_spans(config)[rank]]
    for stage in stages:
        initialize(stage, 1)
    for _, parameter, _ in specs_of(stages):
        parameter.gradient_sink = FixedSink(torch.zeros_like(parameter))
    depths = config.model.mtp_num_layers or 0
    executor, plan = GPTExecutor(stages, mesh, TokenLoss(depths=depths)), LoweredSchedules(config, rank)
    text = tiny_tokens(2, LENGTH)
    arrays = {"tokens": text[:, :-1].numpy(), "labels": text[:, 1:].numpy(), "sample_ids": np.arange(2)}
    arrays |= {"loss_mask": np.ones((2, LENGTH), dtype=bool), "position_ids": np.tile(np.arange(LENGTH), (2, 1))}
    batch = Microbatch.from_arrays(with_ahead(arrays, depths) if depths else arrays)
    executor.begin([batch] * MICROBATCHES, dropout_key=torch.tensor(1))
    with PeakMemory(torch.device("cpu")) as memory:
        for action in plan.training(MICROBATCHES):
            if action.kind in COMMUNICATION:
                continue
            span, hidden = stages[action.chunk].span, {HIDDEN: torch.randn(LENGTH, 2, 64)}
            at_end = span.has_embedding if action.kind == FORWARD else span.has_output
            given = [] if at_end or action.kind == BACKWARD_WEIGHT else [hidden]
            getattr(executor, action.kind)(action.chunk, action.microbatch, *given)
            del hidden, given
    predicted = predicted_memory(config, stages, plan.training(MICROBATCHES), mesh)
    return predicted.activations + predicted.fp8_weights, memory.peak


PIPELINE = {"pipeline_model_parallel_size": 4}
MLP_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


FP8 = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "fp8_backend": "torch"}
EDGES = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 4, "num_layers_at_end_in_bf16": 3}
LLAMA_LIKE = {**LLAMA, "ffn_hidden_size": 160}
DEEPSEEK_LIKE = {**LATENT, "ffn_hidden_size": 160, "q_lora_rank": 48, "kv_lora_rank": 32} | {
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
AHEAD = {"mtp_num_layers": 2}
EXPERTS = {"num_experts": 8, "moe_aux_loss_coeff": [1e-2], "moe_z_loss_coeff": 1e-3, "moe_ffn_hidden_size": 96}
SHARED = {"moe_shared_expert_intermediate_size": 80, "moe_shared_expert_gate": True}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_topk": 3, "moe_router_dtype": "fp64"}
SOME_LAYERS = {"moe_layer_freq": "[0]*3+[1]*5"}


@pytest.mark.parametrize(
    ("network", "settings"),
    [
        pytest.param({}, {}, id="one stage"),
        pytest.param(LLAMA_LIKE, {}, id="one stage, llama"),
        pytest.param(LLAMA_LIKE | {"qk_layernorm": True}, {}, id="one stage, llama, normalised heads"),
        pytest.param(LLAMA_LIKE, FULL, id="one stage, full, llama", marks=pytest.mark.full_matrix),
        pytest.param(DEEPSEEK_LIKE, {}, id="one stage, latent"),
        pytest.param(
            DEEPSEEK_LIKE,
            {"attention_backend": "unfused"},
            id="one stage, latent, unfused",
            marks=pytest.mark.full_matrix,
        ),
        pytest.param(DEEPSEEK_LIKE, FULL, id="one stage, full, latent", marks=pytest.mark.full_matrix),
        pytest.param(LLAMA_LIKE | AHEAD, {}, id="one stage, tokens ahead"),
        pytest.param(LLAMA_LIKE | AHEAD, FULL, id="one stage, full, tokens ahead", marks=pytest.mark.full_matrix),
        pytest.param(DEEPSEEK_LIKE | AHEAD, PIPELINE, id="1f1b, latent, tokens ahead"),
        pytest.param({}, MLP_AGAIN, id="mlp"),
        pytest.param({}, PIPELINE, id="1f1b"),
        pytest.param({}, PIPELINE | FULL, id="1f1b, full", marks=pytest.mark.full_matrix),
        pytest.param({}, PIPELINE | {"pipeline_schedule": "gpipe"}, id="gpipe", marks=pytest.mark.full_matrix),
        pytest.param({}, PIPELINE | {"pipeline_schedule": "zb-h1"}, id="zb-h1"),
        pytest.param({}, FP8, id="FP8"),
        pytest.param(LLAMA_LIKE, FP8, id="FP8, llama", marks=pytest.mark.full_matrix),
        pytest.param(LLAMA_LIKE | EXPERTS, {}, id="experts"),
        pytest.param(
            LLAMA_LIKE | EXPERTS | SHARED,
            {"moe_token_dispatcher_type": "alltoall"},
            id="shared experts",
            marks=pytest.mark.full_matrix,
        ),
        pytest.param(
            LLAMA_LIKE | EXPERTS | SIGMOID | SOME_LAYERS,
            {},
            id="experts of sigmoid in some layers",
            marks=pytest.mark.full_matrix,
        ),
        pytest.param(LLAMA_LIKE | EXPERTS, FULL, id="experts, full", marks=pytest.mark.full_matrix),
        pytest.param(LLAMA_LIKE | EXPERTS, MLP_AGAIN, id="experts, mlp", marks=pytest.mark.full_matrix),
        pytest.param(LLAMA_LIKE | EXPERTS | SHARED | AHEAD, PIPELINE, id="experts, 1f1b, tokens ahead"),
        pytest.param(
            LLAMA_LIKE | EXPERTS | SOME_LAYERS,
            PIPELINE,
            id="experts in some layers, 1f1b",
            marks=pytest.mark.full_matrix,
        ),
        pytest.param(
            {**EXPERTS, "add_bias_linear": False},
            PIPELINE | {"pipeline_schedule": "zb-h1"},
            id="experts, zb-h1",
            marks=pytest.mark.full_matrix,
        ),
        pytest.param(LLAMA_LIKE, FP8 | EDGES, id="FP8 without first and last layers"),
        pytest.param({}, PIPELINE | {"num_virtual_stages_per_pipeline_rank": 2}, id="interleaved"),
    ],
)
def test_the_prediction_is_what_a_step_holds_within_15_percent(
    network: dict[str, Any], settings: dict[str, Any]
) -> None:
    config = config_of(network, **settings)
    for rank in {0, config.layout.pipeline_model_parallel_size - 1}:
        predicted, measured = step_of(config, rank)
        assert predicted == pytest.approx(measured, rel=0.15), rank


@pytest.mark.parametrize(("tp", "sequence_parallel", "per_token"), [(1, False, 34), (4, False, 16), (4, True, 8.5)])
def test_a_layer_keeps_what_the_paper_says(tp: int, sequence_parallel: bool, per_token: float) -> None:
    """Korthikanti et al. 2022: s b h (10 + 24 / t), with sequence parallelism 34 / t, in half precision."""
    config = config_of({"hidden_dropout": 0.1}, tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel)
    config.precision.bf16 = True
    each = chunk_activations(config, 131, layers=1, has_output=False, fused_attention=True).kept
    assert each == LENGTH * 2 * 64 * per_token
    config.training.recompute_granularity, config.training.recompute_num_layers = "full", 1
    config.training.recompute_method = "uniform"
    each = chunk_activations(config, 131, layers=1, has_output=False, fused_attention=True).kept
    assert each == LENGTH * 2 * 64 * 2 / (tp if sequence_parallel else 1)
