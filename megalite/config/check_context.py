"""Problems of context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm, prod

from megalite.config.resolve import context_exchange, heads_exchanged
from megalite.config.schema import LayoutConfig, RunConfig


def context_problems(config: RunConfig) -> Iterator[str]:
    """Problems of cutting sequences over context-parallel ranks."""
    layout, length = config.layout, config.data.seq_length
    cp, tp = layout.context_parallel_size, layout.tensor_model_parallel_size
    if cp == 1:
        return
    if length is not None and length % (2 * cp):
        yield (
            f"--seq-length {length} is not a multiple of 2 x --context-parallel-size {cp}: each rank holds two equal "
            "chunks of a sequence"
        )
    elif length is not None and layout.sequence_parallel and length % (cp * lcm(2, tp)):
        yield (
            f"--sequence-parallel: --tensor-model-parallel-size {tp} does not divide the {length // cp} tokens of "
            f"--seq-length {length} on each of the --context-parallel-size {cp} ranks"
        )
    problem = _size_problem(layout)
    if problem is not None:
        yield problem
    elif heads_exchanged(layout) > 1:
        yield from _head_problems(config)


def _size_problem(layout: LayoutConfig) -> str | None:
    cp, sizes = layout.context_parallel_size, layout.hierarchical_context_parallel_sizes
    option, exchange = "--hierarchical-context-parallel-sizes", context_exchange(layout)
    if len(set(layout.cp_comm_type or ())) > 1:
        kinds = " ".join(layout.cp_comm_type or ())
        return f"--cp-comm-type {kinds}: all layers exchange the same; give one of them"
    if exchange != "a2a+p2p":
        return None if sizes is None else f"{option} needs --cp-comm-type a2a+p2p, not {exchange}"
    if sizes is None:
        return f"--cp-comm-type a2a+p2p needs {option}: two numbers whose product is --context-parallel-size {cp}"
    if len(sizes) != 2 or prod(sizes) != cp:
        given = " ".join(map(str, sizes))
        return f"{option} {given} must be two numbers whose product is --context-parallel-size {cp}"
    return None


def _head_problems(config: RunConfig) -> Iterator[str]:
    layout, model = config.layout, config.model
    tp, exchanged = layout.tensor_model_parallel_size, heads_exchanged(layout)
    heads, groups = model.num_attention_heads, model.num_query_groups
    cut = f"{exchanged} ranks that exchange heads (--cp-comm-type {context_exchange(layout)})"
    if heads is None or heads % tp:
        return
    if heads // tp % exchanged:
        yield (
            f"{cut} do not divide the {heads // tp} heads of a rank (--num-attention-heads {heads} / "
            f"--tensor-model-parallel-size {tp}): use --cp-comm-type p2p or all_gather"
        )
    elif model.group_query_attention and (mine := max(1, groups // tp)) % exchanged and exchanged % mine:
        yield (
            f"{cut} and the {mine} key/value heads of a rank (--num-query-groups {groups} / "
            f"--tensor-model-parallel-size {tp}): one must divide the other; use --cp-comm-type p2p or all_gather"
        )
