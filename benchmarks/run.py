"""Training speed of one process, as a share of this machine's GEMM peak measured in the same run.

Absolute times differ between machines; the ratio (MFU) and the comparison of two commits on one machine count.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from megalite.config.resolve import resolve
from megalite.config.schema import DataConfig, ModelConfig, PrecisionConfig, RunConfig, TrainingConfig
from megalite.distributed.launch import keep_freed_memory
from megalite.distributed.mesh import single_process_mesh
from megalite.estimate.model import training_flops_per_token
from megalite.models.gpt import GPTStage, plain_tokens, units_of
from megalite.models.stages import whole_model
from megalite.nn.attention_backend import choose_backend
from megalite.nn.module import Build, initialize
from megalite.optimizer.optimizer import Optimizer
from megalite.precision.policy import Precision

SEQUENCE, MICRO_BATCH = 512, 4
GPT2 = ModelConfig(
    num_layers=6, hidden_size=512, num_attention_heads=8, max_position_embeddings=SEQUENCE,
    hidden_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
LLAMA = ModelConfig(
    num_layers=6, hidden_size=512, num_attention_heads=8, group_query_attention=True, num_query_groups=4, swiglu=True,
    ffn_hidden_size=1408, normalization="RMSNorm", position_embedding_type="rope", add_bias_linear=False,
    untie_embeddings_and_output_weights=True, hidden_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
WORKLOADS = {"gpt2-45m": (GPT2, 50304), "llama-49m": (LLAMA, 32000)}


def gemm_peak(dtype: torch.dtype, size: int = 2048) -> float:
    """FLOP/s of a square matrix product."""
    a = torch.randn(size, size).to(dtype)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / statistics.median(times[1:])


def step_times(config: RunConfig, vocab_size: int, steps: int) -> list[float]:
    """Seconds of each step after two for warm-up: forward, backward, norm, clip and update."""
    precision = Precision.from_config(config.precision)
    build = Build(config.model, single_process_mesh(), precision)
    assert config.model.num_layers is not None
    stage = GPTStage(build, vocab_size, whole_model(config.model.num_layers), choose_backend(config, "cpu"))
    initialize(stage, 1234)
    optimizer = Optimizer(units_of([stage]), build.mesh, precision, config.optimizer)
    tokens = torch.randint(0, vocab_size, (MICRO_BATCH, SEQUENCE + 1))
    times = []
    for _ in range(steps + 2):
        begin = time.perf_counter()
        optimizer.begin_step(1)
        hidden = stage(tokens[:, :-1], plain_tokens(tokens[:, :-1]))
        stage.loss(hidden, tokens[:, 1:], scale=1 / (MICRO_BATCH * SEQUENCE)).total.backward()
        optimizer.reduce_gradients()
        optimizer.step(optimizer.measure(1.0), lr=1e-4, decoupled_lr=1e-4, weight_decay=0.01, loss_scale=1.0)
        times.append(time.perf_counter() - begin)
    return times[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    print(f"{'workload':12} {'tokens/s':>9} {'min':>7} {'max':>7} {'GEMM peak':>14} {'MFU':>6}")
    for name in WORKLOADS if args.workload == "all" else [args.workload]:
        model, vocab_size = WORKLOADS[name]
        config = RunConfig(
            model=model,
            data=DataConfig(seq_length=SEQUENCE),
            training=TrainingConfig(micro_batch_size=MICRO_BATCH, train_iters=1),
            precision=PrecisionConfig(bf16=args.dtype == "bf16"),
        )
        config = resolve(config, 1)
        peak = gemm_peak(dtype)
        rates = [MICRO_BATCH * SEQUENCE / seconds for seconds in step_times(config, vocab_size, args.steps)]
        median = statistics.median(rates)
        share = median * training_flops_per_token(config.model, vocab_size, SEQUENCE) / peak
        print(f"{name:12} {median:9.0f} {min(rates):7.0f} {max(rates):7.0f} {peak / 1e12:8.3f} TFLOP/s {share:6.1%}")


if __name__ == "__main__":
    main()
