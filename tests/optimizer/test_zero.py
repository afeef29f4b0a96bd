"""ZeRO's stages compute the same, hold and send what the formulas say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megalite.distributed.pool import ProcessPool
from megalite.estimate.memory import estimate_memory
from megalite.verify.layouts import Variant
from megalite.verify.proof import Prover
from tests.optimizer.zero_runs import LEAN, STRATEGIES, Outcome, make_lean, run_zero, same, zero_config
from tests.verify.networks import network

STEPS = 2
LAYERS = 3  # one more than are whole at a time
Zero = Callable[..., list[Outcome]]


def overlap(strategy: str) -> dict[str, bool]:
    return {"overlap_grad_reduce": True} | ({"overlap_param_gather": True} if strategy != "no_shard" else {})


@pytest.fixture(scope="module")
def zero(pool: ProcessPool) -> Zero:
    """What each rank of a run with a strategy, a number of ranks and flags saw. Several laws speak of one run."""

    outcomes: dict[frozenset[tuple[str, Any]], list[Outcome]] = {}

    def run(strategy: str, ranks: int = 2, **flags: Any) -> list[Outcome]:
        fields: dict[str, Any] = {"num_layers": LAYERS, "tied": False, "bf16": False, "microbatches": 1, **flags}
        key = frozenset({**fields, "strategy": strategy, "ranks": ranks}.items())
        if key not in outcomes:
            outcomes[key] = run_zero(pool, zero_config(strategy, dp=ranks, **fields), ranks, STEPS)
        return outcomes[key]

    return run


@pytest.mark.parametrize("flags", [{}, {"bf16": True}, *({"states": states} for states in LEAN)], ids=str)
def test_with_one_microbatch_all_stages_are_equal_bit_by_bit(zero: Zero, flags: dict[str, Any]) -> None:
    outcomes = [zero(strategy, **flags)[0] for strategy in STRATEGIES]
    assert all(same(outcomes[0], other) for other in outcomes[1:])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_with_several_microbatches_0_is_1_and_2_is_3_bit_by_bit(zero: Zero, tied: bool) -> None:
    none, optim, grads, params = (zero(strategy, tied=tied, microbatches=3)[0] for strategy in STRATEGIES)
    assert same(none, optim)
    assert same(grads, params)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_overlap_changes_no_bit(zero: Zero, strategy: str) -> None:
    plain, overlapped = (zero(strategy, tied=False, microbatches=3, **more)[0] for more in ({}, overlap(strategy)))
    assert same(plain, overlapped)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads"])
def test_bucket_sizes_from_one_parameter_to_all_change_no_bit(zero: Zero, strategy: str) -> None:
    sizes: list[dict[str, int]] = [{"ddp_bucket_size": 1}, {"ddp_bucket_size": 5_000}, {}]
    outcomes = [zero(strategy, tied=False, microbatches=3, **overlap(strategy), **size)[0] for size in sizes]
    assert len(outcomes[0].buckets) > len(outcomes[1].buckets) > len(outcomes[2].buckets) == 1
    assert all(same(outcomes[0], other) for other in outcomes[1:])


@pytest.mark.parametrize("states", LEAN)
def test_overlap_and_small_buckets_change_no_bit_of_lean_states(zero: Zero, states: str) -> None:
    flags = {"ddp_bucket_size": 5_000, **overlap("optim_grads")}
    plain, cut = (zero("optim_grads", states=states, **more)[0] for more in ({}, flags))
    assert len(plain.buckets) < len(cut.buckets)
    assert same(plain, cut)


@pytest.mark.parametrize("states", LEAN)
def test_a_lean_update_on_the_host_changes_no_bit(zero: Zero, states: str) -> None:
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.3}
    plain, hosted = (zero("optim", states=states, **flags)[0] for flags in ({}, offload))
    assert same(plain, hosted)
    assert hosted.held["host"] > 0


@pytest.mark.parametrize(("strategy", "fraction"), [("no_shard", 1.0), ("optim_grads", 0.3)])
def test_an_update_on_the_host_changes_no_bit(zero: Zero, strategy: str, fraction: float) -> None:
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    plain, hosted = (zero(strategy, bf16=False, **flags)[0] for flags in ({}, offload))
    assert same(plain, hosted)
    assert hosted.held["host"] >= 0.9 * fraction * 12 * hosted.held["elements"] / (2 if strategy != "no_shard" else 1)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_four_shards_equal_one_process(pool: ProcessPool, strategy: str) -> None:
    """Other layouts with sharding: see the matrix of `verify`."""
    variant = Variant(dp=4, sharding=strategy)
    difference = Prover(pool, steps=STEPS).prove(variant.apply(network(variant)), 4)
    assert difference.worst <= 1e-10, difference


@pytest.mark.parametrize(
    ("states", "variant"),
    [
        ("bf16", Variant(tp=2, sequence_parallel=True, dp=2, sharding="optim_grads_params")),
        ("fp16", Variant(tp=4)),
        ("fp8", Variant(tp=2, pp=2, schedule="1f1b")),
    ],
    ids=str,
)
def test_lean_states_equal_those_of_one_process(pool: ProcessPool, states: str, variant: Variant) -> None:
    """In float64, rounded to the formats: a difference in the last bit would rarely round to another number."""
    config = variant.apply(network(variant, llama=variant.tp == 4))
    make_lean(config, states)
    config.precision.main_grads_dtype = "fp32"
    difference = Prover(pool, steps=4).prove(config, variant.processes)
    assert difference.worst <= 1e-10, difference


@pytest.mark.parametrize(
    ("pp", "dp"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.full_matrix)], ids=["PP 2", "DP 2", "both"]
)
def test_a_rank_of_vocabulary_padding_alone_takes_part(pool: ProcessPool, pp: int, dp: int) -> None:
    """101 ids padded to 256 rows over two ranks: the second holds none of the table, which stages share."""
    sharding = "optim_grads" if dp > 1 else "no_shard"
    variant = Variant(tp=2, sequence_parallel=True, pp=pp, dp=dp, schedule="1f1b", sharding=sharding)
    config = variant.apply(network(variant, tied=True))
    config.tokenizer.vocab_size, config.model.make_vocab_size_divisible_by = 100, 128
    difference = Prover(pool, steps=STEPS).prove(config, variant.processes)
    assert difference.worst <= 1e-10, difference


BYTES = {  # per parameter in bf16 with fp32 gradients: parameters, gradients, main parameters, moments
    "no_shard": lambda d: (2, 4, 4, 8),
    "optim": lambda d: (2, 4, 4 / d, 8 / d),
    "optim_grads": lambda d: (2, 4 / d, 4 / d, 8 / d),
    "optim_grads_params": lambda d: (2 / d, 4 / d, 4 / d, 8 / d),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_holds_what_the_formulas_say(zero: Zero, strategy: str, ranks: int) -> None:
    for outcome in zero(strategy, ranks, bf16=True):
        expected = [share * outcome.held["elements"] for share in BYTES[strategy](ranks)]
        assert [outcome.held[kind] for kind in ("parameters", "gradients", "main", "moments")] == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("states", LEAN)
def test_a_rank_holds_what_the_memory_report_predicts_of_lean_states(zero: Zero, strategy: str, states: str) -> None:
    config = zero_config(strategy, states=states)
    for outcome in zero(strategy, states=states):
        memory = estimate_memory(config, outcome.held["elements"], activations=0, ranks=2)
        expected = [memory.parameters, memory.main_gradients, memory.main_parameters, memory.moments]
        assert [outcome.held[kind] for kind in ("parameters", "gradients", "main", "moments")] == expected


@pytest.mark.parametrize("overlapped", [False, True])
def test_at_most_the_two_largest_units_are_gathered_at_a_time(zero: Zero, overlapped: bool) -> None:
    flags = overlap("optim_grads_params") if overlapped else {}
    for outcome in zero("optim_grads_params", tied=False, microbatches=3, **flags):
        assert 0 < outcome.peak_gathered <= sum(sorted(outcome.buckets)[-2:])


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("overlapped", [False, True])
def test_few_sharded_gradients_are_whole_at_a_time(zero: Zero, strategy: str, overlapped: bool) -> None:
    """Those of the unit at work, and with overlap of the two last that are through; and one at a border of units."""
    flags: dict[str, Any] = overlap(strategy) if overlapped else {}
    flags |= {"ddp_bucket_size": 5_000} if strategy == "optim_grads" else {}
    buckets_of_a_unit = 3 if strategy == "optim_grads" else 1
    for outcome in zero(strategy, microbatches=2, num_layers=12, **flags):
        largest = sorted(outcome.buckets)[-buckets_of_a_unit * (3 if overlapped else 1) - 1 :]
        assert 0 < outcome.peak_gradients <= sum(largest) < 0.6 * outcome.held["elements"]


@pytest.mark.parametrize(("ranks", "microbatches", "overlapped"), [(2, 3, True), (3, 1, False)])
def test_a_rank_sends_what_the_formulas_say(zero: Zero, ranks: int, microbatches: int, overlapped: bool) -> None:
    """In (d - 1)/d of the buckets' bytes: 2 for a reduction and a gather. Stages 2 and 3 reduce every microbatch.

    Stage 3 gathers for every forward and every backward, but for what isn't needed or is there already: the embedding
    in a backward, which reads no values; the output layer, whose backward follows its forward; and where gathers run
    ahead the final norm, for the same reason, and the first layer, whose forward follows its backward.
    """
    for strategy in STRATEGIES:
        flags = overlap(strategy) if overlapped else {}
        for outcome in zero(strategy, ranks, tied=False, microbatches=microbatches, **flags):
            sizes = outcome.bucket_sizes
            spared = microbatches * (sizes["embedding.word_embeddings.weight"] + sizes["output_layer.weight"])
            if overlapped:
                spared += microbatches * sizes["decoder.final_layernorm.weight"]
                spared += (microbatches - 1) * sizes["decoder.layers.0.mlp.linear_fc1.weight"]
            whole = outcome.held["elements"]
            elements = {
                "no_shard": 2 * whole,
                "optim": 2 * whole,
                "optim_grads": (1 + microbatches) * whole,
                "optim_grads_params": 3 * microbatches * whole - spared,
            }[strategy]
            assert outcome.bytes_per_step == 4 * elements * (ranks - 1) // ranks, strategy
