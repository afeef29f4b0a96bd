"""Training steps of others, on the weights that ours begin with: plain PyTorch and `transformers`.

Both hold fp32 parameters and compute under autocast in half precision, so that they train what ours trains; fused
AdamW, clipping by the global norm.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.plain import Llama
from benchmarks.workloads import CLIP, RATE, SEED, Workload
from megalite.checkpoint.huggingface.config import describe_network
from megalite.config.schema import PrecisionConfig
from megalite.distributed.mesh import single_process_mesh
from megalite.models.gpt import GPTStage
from megalite.models.stages import whole_model
from megalite.nn.attention_backend import choose_backend
from megalite.nn.module import Build, initialize, named_specs
from megalite.precision.policy import Precision


class Missing(Exception):
    """What isn't installed, and the command that installs it."""


def first_weights(workload: Workload, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fp32 weights that ours begin with, under transformers' names, and the `config.json` of the network."""
    config = workload.config(PrecisionConfig())
    architecture, values = describe_network(config.model, workload.vocab_size)
    build = Build(config.model, single_process_mesh(device), Precision.from_config(config.precision))
    span = whole_model(config.model.num_layers)
    stage = GPTStage(build, workload.vocab_size, span, choose_backend(config, device.type))
    initialize(stage, SEED)
    tensors: dict[str, Tensor] = {}
    for name, parameter, spec in named_specs(stage):
        (box,) = spec.boxes
        logical = parameter.detach()[box.local_slices]
        tensors |= {part.name: part.extract(logical) for part in architecture.parts(name, spec.shape)}
    return values, tensors


class PeerSteps:
    """Steps of a module. `loss_of`: from tokens [b, s + 1] on the device to the mean loss."""

    def __init__(self, model: nn.Module, loss_of: Callable[[Tensor], Tensor], dtype: str, device: torch.device):
        self.model, self.loss_of, self.device = model, loss_of, device
        self.autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, fused=True
        )
        self._waiting: deque[Tensor] = deque()

    def take(self, batches: Sequence[Tensor]) -> None:
        """The data of the next steps, as `OurSteps.take`."""
        self._waiting += [tokens.pin_memory() if self.device.type == "cuda" else tokens for tokens in batches]

    def step(self) -> tuple[Tensor, Tensor]:
        """Loss and gradient norm of a step, on the device, without waiting for it."""
        tokens = self._waiting.popleft().to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            loss = self.loss_of(tokens)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), norm


def plain_steps(workload: Workload, dtype: str, device: torch.device, *, compiled: bool) -> PeerSteps:
    """Of the plain Llama."""
    with device:  # billions of numbers are slow on a host
        model = Llama(workload.config(PrecisionConfig()).model, workload.vocab_size, workload.sequence)
    model.load_state_dict(first_weights(workload, device)[1])
    if compiled:
        check_compiler(device)
        model.compile_parts()
    return PeerSteps(model, model, dtype, device)


def transformers_steps(workload: Workload, dtype: str, device: torch.device, *, compiled: bool) -> PeerSteps:
    """Of transformers' model of the same network, with SDPA. Compiled: the model together with its loss."""
    if find_spec("transformers") is None:
        raise Missing("not installed: python -m pip install -e '.[hf]'")
    import transformers

    values, tensors = first_weights(workload, torch.device("cpu"))
    config = transformers.AutoConfig.for_model(**values)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    lacking, unknown = model.load_state_dict(tensors, strict=False)
    if unknown or not set(lacking) <= {"lm_head.weight"}:  # tied to the embedding
        raise ValueError(f"other weights than ours: {lacking} {unknown}")
    model.to(device).train()

    def loss_of(tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    if compiled:
        check_compiler(device)
    return PeerSteps(model, torch.compile(loss_of) if compiled else loss_of, dtype, device)


def check_compiler(device: torch.device) -> None:
    """Raise `Missing` where torch.compile lacks what it compiles with."""
    if device.type == "cuda" and find_spec("triton") is None:
        raise Missing("torch.compile needs triton: python -m pip install triton")
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise Missing("torch.compile needs a C++ compiler; on Debian and Ubuntu: apt-get install g++")
