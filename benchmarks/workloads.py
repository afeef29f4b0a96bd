"""The models that are measured, and the training steps of ours that are.

Key idea: a step is `Trainer.step` of a run's own parts, so what is measured is what trains; only the data are handed
in, so that a peer gets the same ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config.errors import refuse
from megalite.config.resolve import resolve
from megalite.config.schema import (
    DataConfig,
    LayoutConfig,
    LearningRateConfig,
    ModelConfig,
    PrecisionConfig,
    RunConfig,
    TrainingConfig,
)
from megalite.data.microbatch import Microbatch
from megalite.distributed.mesh import single_process_mesh
from megalite.estimate.model import training_flops_per_token
from megalite.nn.attention_backend import choose_backend
from megalite.nn.pure import compiler_problems
from megalite.optimizer.schedule import BatchSchedule, Schedule
from megalite.precision.loss_scaler import LossScaler
from megalite.training.engine import Engine
from megalite.training.model import build_model
from megalite.training.objective import TokenLoss
from megalite.training.resume import Progress, TrainingState
from megalite.training.trainer import Trainer

RATE, CLIP, SEED = 1e-4, 1.0, 1234


@dataclass(frozen=True)
class Workload:
    """A model, and the batch of one step on one device: `micro_batch` sequences of `sequence` tokens."""

    model: ModelConfig
    vocab_size: int
    sequence: int
    micro_batch: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.sequence * self.micro_batch

    def config(self, precision: PrecisionConfig, processes: int = 1) -> RunConfig:
        """Resolved."""
        config = RunConfig(
            model=self.model,
            layout=LayoutConfig(),
            data=DataConfig(seq_length=self.sequence),
            learning_rate=LearningRateConfig(lr=RATE, lr_decay_style="constant"),
            training=TrainingConfig(micro_batch_size=self.micro_batch, train_iters=1_000_000, seed=SEED),
            precision=precision,
        )
        return resolve(config, processes)

    @property
    def flops(self) -> float:
        """Of forward and backward for a token."""
        model = self.config(PrecisionConfig()).model
        return training_flops_per_token(model, self.vocab_size, self.sequence)

    def batches(self, seed: int, count: int) -> list[Tensor]:
        """Random tokens [b, s + 1] of so many steps, on the host."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.micro_batch, self.sequence + 1)
        return [torch.randint(self.vocab_size, shape, generator=generator) for _ in range(count)]


def gpt2(layers: int, hidden: int, heads: int, sequence: int) -> ModelConfig:
    return ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, max_position_embeddings=sequence,
        hidden_dropout=0.0, attention_dropout=0.0, make_vocab_size_divisible_by=1,
    )  # fmt: skip


def llama(layers: int, hidden: int, heads: int, groups: int, inner: int) -> ModelConfig:
    return ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, swiglu=True, ffn_hidden_size=inner,
        group_query_attention=groups != heads, num_query_groups=groups, normalization="RMSNorm",
        position_embedding_type="rope", add_bias_linear=False, untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0, attention_dropout=0.0, make_vocab_size_divisible_by=1,
    )  # fmt: skip


CPU = {
    "w1": Workload(gpt2(6, 512, 8, 512), 50304, 512, 4),
    "w1l": Workload(llama(6, 512, 8, 4, 1408), 32000, 512, 4),
}
"""45 million parameters as GPT-2, 49 million as Llama, for a CPU."""
TINY_CPU = {
    "w1": Workload(gpt2(2, 32, 4, 32), 256, 32, 2),
    "w1l": Workload(llama(2, 32, 4, 2, 64), 256, 32, 2),
}
GPU = {
    "350m": Workload(llama(24, 1024, 16, 16, 2816), 32000, 2048, 8),
    "1.3b": Workload(llama(24, 2048, 16, 16, 5632), 32000, 2048, 4),
    "7b-shape": Workload(llama(4, 4096, 32, 32, 11008), 32000, 4096, 2),
}
"""For one GPU; the last has 4 of the 32 layers of Llama 2 7B."""
TINY_GPU = {name: Workload(llama(2, 64, 4, 4, 128), 256, 32, 2) for name in GPU}


class OurSteps:
    """Steps of `Trainer` on one process."""

    def __init__(
        self,
        workload: Workload,
        precision: PrecisionConfig,
        device: torch.device,
        *,
        rate: float = RATE,
        compiled: bool = False,
    ):
        """`rate`: the learning rate. `compiled`: as by `--compile`; a FlagError where that can't be."""
        config = workload.config(precision)
        config.learning_rate.lr, config.training.compile = rate, compiled
        refuse(compiler_problems(compiled, device.type))
        backend = choose_backend(config, device.type)
        self.model = build_model(
            config, single_process_mesh(device), vocab_size=workload.vocab_size, backend=backend, classes=None
        )
        self._waiting: deque[Microbatch] = deque()
        progress = Progress(
            TrainingState(dropout_seed=SEED),
            Schedule.from_config(config, BatchSchedule.from_config(config)),
            LossScaler.from_config(config.precision),
            {},
        )
        self.trainer = Trainer(self.model, Engine(self.model, TokenLoss()), progress, self._microbatches())

    def _microbatches(self) -> Iterator[Microbatch]:
        while True:
            yield self._waiting.popleft()

    def take(self, batches: Sequence[Tensor]) -> None:
        """The data of the next steps, tokens [b, s + 1] on the host; in page-locked memory, as a loader has them."""
        for tokens in batches:
            batch = microbatch(tokens)
            self._waiting.append(batch.pin_memory() if self.model.mesh.device.type == "cuda" else batch)

    def step(self) -> tuple[float, float]:
        """Loss and gradient norm of a step."""
        record = self.trainer.step()
        return record.lm_loss, record.grad_norm


def microbatch(tokens: Tensor) -> Microbatch:
    """Of which every token counts."""
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1]).expand_as(inputs).contiguous()
    return Microbatch(inputs, labels, torch.ones_like(inputs, dtype=torch.bool), positions, torch.arange(len(inputs)))
