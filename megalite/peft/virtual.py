"""The trained vectors of prefix tuning (Li and Liang 2021) and prompt tuning (Lester et al. 2021).

Key idea: a prefix belongs to the layer whose keys and values it precedes, so a pipeline stage needs nothing of another
stage, and it is cut over ranks as keys and values are: by groups, or copied where several ranks share a group. The
network that a prefix may be made by has an embedding and an inner layer in every layer of the model for the same
reason.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megalite.distributed.param_spec import ZEROS, Init, ParamSpec, Treatment, grouped_qkv, replicated
from megalite.nn.attention_backend import AttentionBackend
from megalite.nn.linear import linear
from megalite.nn.module import Build, ShardedModule


def backend_problem(backend: AttentionBackend, kind: str, device_type: str) -> str | None:
    """What is wrong where the virtual tokens of an adapter of this kind need a mask and the attention kernel takes
    none."""
    flash = device_type == "cuda" and backend.sdpa == (SDPBackend.FLASH_ATTENTION,)
    without_mask = (backend.kernel == "varlen" and kind in ("prefix", "prompt")) or (flash and kind == "prefix")
    if not without_mask:
        return None
    return (
        f"--peft {kind}: the attention kernel chosen ({backend.reason}) takes no mask, which virtual tokens need here: "
        "use --attention-backend unfused"
    )


def _per_group(build: Build, tail: tuple[int, ...], init: Init, *, decays: bool = True) -> ParamSpec:
    """Of a tensor [groups, 2, *tail]: key and value of each group."""
    groups, place = build.config.num_query_groups, build.place()
    boxes = tuple(box for box in grouped_qkv(groups, 0, tail, place) if prod(box.shape))
    return ParamSpec((groups, 2, *tail), (max(1, groups // place.tp), 2, *tail), boxes, init, Treatment(decays))


def prefix_from_network(embedding: Tensor, inner: tuple[Tensor, Tensor], outer: tuple[Tensor, Tensor]) -> Tensor:
    """Keys and values [groups, 2, n, d] from whole parameters: `embedding` [n, h], and weight and bias of both layers,
    [m, h], [m], [groups, 2, d, m], [groups, 2, d]."""
    y = torch.tanh(embedding @ inner[0].t() + inner[1])
    return (torch.einsum("nm,gkdm->gknd", y, outer[0]) + outer[1][:, :, None]).contiguous()


class Prefix(ShardedModule):
    """Keys and values [groups, 2, n, d] of one layer, themselves trained or made by a network of two layers."""

    def __init__(self, build: Build, count: int, *, hidden: int | None):
        """`hidden`: inner width of the network; None: without one."""
        super().__init__()
        config, place = build.config, build.place()
        assert config.kv_channels is not None and config.hidden_size is not None
        self.count, self.width, self.group = count, config.kv_channels, build.mesh.tp
        self.gradients = build.weight_gradients
        self.is_made = hidden is not None
        init = Init(std=config.init_method_std)
        if hidden is None:
            self.weight = self.add_parameter("weight", _per_group(build, (count, self.width), init), build)
            return

        def whole(*shape: int, init: Init) -> ParamSpec:
            return ParamSpec(shape, shape, replicated(shape, place), init, Treatment(len(shape) > 1))

        inputs = config.hidden_size
        self.embedding = self.add_parameter("embedding", whole(count, inputs, init=Init(std=1.0)), build)
        inner, outer = (Init("uniform", value=size**-0.5) for size in (inputs, hidden))
        self.inner_weight = self.add_parameter("inner_weight", whole(hidden, inputs, init=inner), build)
        self.inner_bias = self.add_parameter("inner_bias", whole(hidden, init=ZEROS), build)
        self.outer_weight = self.add_parameter("outer_weight", _per_group(build, (self.width, hidden), outer), build)
        bias = _per_group(build, (self.width,), ZEROS, decays=False)
        self.outer_bias = self.add_parameter("outer_bias", bias, build)

    def vectors(self) -> Tensor:
        """This rank's keys and values [local groups, 2, n, d]."""
        if not self.is_made:
            return self.weight
        inner = linear(self.embedding, self.inner_weight, gradients=self.gradients) + self.inner_bias
        # The gradient of what all ranks hold alike is summed over their groups here.
        outer = linear(torch.tanh(inner), self.outer_weight, self.group, gradients=self.gradients)
        vectors = outer.view(self.count, *self.outer_bias.shape) + self.outer_bias
        return vectors.permute(1, 2, 0, 3)

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """`keys` and `values` [s, b, local groups, d] → [n + s, b, local groups, d]."""
        vectors = self.vectors().permute(1, 2, 0, 3).unsqueeze(2)  # [2, n, 1, local groups, d]
        first = vectors.expand(-1, -1, keys.shape[1], -1, -1)
        return torch.cat((first[0], keys)), torch.cat((first[1], values))


class Prompt(ShardedModule):
    """Embeddings [n, hidden] that stand before those of the tokens."""

    def __init__(self, build: Build, count: int):
        super().__init__()
        config = build.config
        assert config.hidden_size is not None
        shape, self.count = (count, config.hidden_size), count
        boxes = replicated(shape, build.place(), partial=build.mesh.layout.sequence_parallel)
        spec = ParamSpec(shape, shape, boxes, Init(std=config.init_method_std))
        self.weight = self.add_parameter("weight", spec, build)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [s, b, h] of the whole sequence → [n + s, b, h]."""
        return torch.cat((self.weight[:, None].expand(-1, x.shape[1], -1), x))
