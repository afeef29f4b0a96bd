"""Generation with a cache and padding is what the plain model says of each prompt alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.huggingface.config import parse_config
from megalite.config.errors import UserError
from megalite.config.schema_finetune import PeftConfig
from megalite.distributed.mesh import single_process_mesh
from megalite.inference import generate as room
from megalite.inference.generate import GenerationCache, PaddedBatch, stream
from megalite.inference.options import GenerationOptions
from megalite.models.gpt import GPTStage, plain_tokens
from megalite.peft.apply import apply_peft
from tests.checkpoint.huggingface.folders import CASES, model_of
from tests.helpers import BF16, FP32, FP64, LATENT, LLAMA, VOCABULARY, tiny_model
from tests.inference.checkpoints import generate
from tests.models import hf_models

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [101, 102, 103, 104, 105]]
NEW = 10
GREEDY = GenerationOptions(max_new_tokens=NEW)
SAMPLED = GenerationOptions(max_new_tokens=NEW, temperature=1.5, top_k=60, top_p=0.95, seed=3)

NETWORKS: dict[str, dict[str, Any]] = {
    "yarn": {**LLAMA, "position_embedding_type": "yarn", "rope_original_max_position_embeddings": 16},
    "multi-latent attention": LATENT,
    "multi-latent attention, yarn, window": {
        **LATENT,
        "q_lora_rank": None,
        "position_embedding_type": "yarn",
        "rope_original_max_position_embeddings": 16,
        "yarn_mscale": 1.0,
        "yarn_mscale_all_dim": 0.5,
        "window_size": "4,0",
    },
    "learned positions": {},
    "rotary, grouped queries": LLAMA,
    "no positions": {"position_embedding_type": "none"},
    "window": {"window_size": "4,0"},
    "rotary, grouped queries, window": {**LLAMA, "window_size": "3,0"},
    "interleaved partial rotary, one group": {
        "position_embedding_type": "rope",
        "rotary_interleaved": True,
        "rotary_percent": 0.5,
        "num_query_groups": 1,
        "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True,
    },
}
networks = pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())
kernels = pytest.mark.parametrize("kernel", ["auto", "unfused"])


def build(**overrides: Any) -> GPTStage:
    """An fp64 model with weights large enough that every token depends on those before it."""
    return tiny_model(single_process_mesh(), FP64, init_method_std=0.4, **overrides)


@torch.no_grad()
def plain_logits(model: GPTStage, tokens: list[int]) -> Tensor:
    """Float64 [vocabulary] after `tokens`, by the path that training takes: no cache, no padding."""
    ids = torch.tensor([tokens])
    return model.logits(model(ids, plain_tokens(ids)))[-1, 0]


def by_recomputing(model: GPTStage, prompt: list[int], choose: Callable[[Tensor, int], Tensor]) -> list[int]:
    tokens = list(prompt)
    for step in range(NEW):
        tokens.append(int(choose(plain_logits(model, tokens)[None], step).item()))
    return tokens[len(prompt) :]


@networks
@kernels
def test_cached_generation_equals_recomputing_the_whole_prefix(network: dict[str, Any], kernel: str) -> None:
    model = build(attention_backend=kernel, **network)
    for prompt in PROMPTS:
        expected = by_recomputing(model, prompt, lambda logits, _: logits.argmax(-1))
        assert generate(model, [prompt], GREEDY) == [expected]
        assert len(set(expected)) > 2


@networks
@kernels
def test_a_batch_of_unequal_prompts_equals_each_alone(network: dict[str, Any], kernel: str) -> None:
    model = build(attention_backend=kernel, **network)
    together = PaddedBatch(model, PROMPTS, new_tokens=NEW)
    logits = [together.prefill()]
    for step in range(NEW):
        logits.append(together.advance(torch.tensor([[step], [7], [11 * step], [0]])))
    for row, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for step, found in enumerate(logits):
            torch.testing.assert_close(found[row], plain_logits(model, tokens), rtol=0, atol=1e-12)
            tokens.append((step, 7, 11 * step, 0)[row])


@pytest.mark.parametrize(
    ("network", "kind"),
    [
        *itertools.product([{}, LLAMA, {**LLAMA, "window_size": "3,0"}], ["lora", "prefix", "prompt"]),
        *itertools.product([LATENT], ["lora", "prompt"]),
    ],
    ids=str,
)
def test_an_adapter_s_part_in_generation_is_its_part_in_training(network: dict[str, Any], kind: str) -> None:
    model = build(**network)
    targets = {"lora_target_modules": ["all-linear"]} if kind == "lora" else {"num_virtual_tokens": 3}
    apply_peft([model], PeftConfig(peft=kind, **targets), mesh=single_process_mesh(), precision=FP64, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    together = PaddedBatch(model, PROMPTS, new_tokens=2)
    for step, found in enumerate((together.prefill(), together.advance(torch.tensor([[1], [2], [3], [4]])))):
        for row, prompt in enumerate(PROMPTS):
            expected = plain_logits(model, prompt + [row + 1] * step)
            torch.testing.assert_close(found[row], expected, rtol=1e-10, atol=1e-10)


def test_a_cache_of_latents_holds_the_latent_vector_and_the_shared_part_of_keys_alone() -> None:
    model = build(**LATENT)
    latent, turned = LATENT["kv_lora_rank"], LATENT["qk_pos_emb_head_dim"]
    cache = GenerationCache(model, tokens=7, batch=3)
    assert cache.nbytes == 2 * 7 * 3 * (latent + turned) * 8  # layers, tokens, batch, bytes


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_what_a_prompt_becomes_does_not_depend_on_its_companions(options: GenerationOptions) -> None:
    model = build(**LLAMA)
    together = generate(model, PROMPTS, options)
    for index, prompt in enumerate(PROMPTS):
        assert generate(model, [prompt], options, indices=[index]) == [together[index]]
    backwards = generate(model, PROMPTS[::-1], options, indices=[3, 2, 1, 0])
    assert backwards == together[::-1]


def test_a_long_prompt_in_parts_equals_the_prompt_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(**LLAMA, window_size="6,0")
    at_once = PaddedBatch(model, PROMPTS, new_tokens=0).prefill()
    monkeypatch.setattr(room, "_PREFILL_TOKENS", 5)
    torch.testing.assert_close(PaddedBatch(model, PROMPTS, new_tokens=0).prefill(), at_once, rtol=0, atol=1e-12)


def test_a_prompt_ends_before_the_end_of_document_and_the_others_go_on() -> None:
    model = build()
    free = generate(model, PROMPTS, GREEDY)
    eod = free[2][4]
    expected = [tokens[: tokens.index(eod)] if eod in tokens else tokens for tokens in free]
    assert len(set(map(len, expected))) > 1
    assert generate(model, PROMPTS, GREEDY, stop=[eod]) == expected
    steps = list(stream(model, [PROMPTS[2]], GREEDY, stop=[eod]))
    assert [ids for (ids,) in steps] == expected[2]  # and no further step
    assert generate(model, PROMPTS[:1], GREEDY, stop=free[0][:1]) == [[]]


def test_learned_positions_can_be_filled_but_not_passed() -> None:
    model = build(max_position_embeddings=16)
    prompt = list(range(12))
    assert len(generate(model, [prompt], GenerationOptions(max_new_tokens=4))[0]) == 4
    with pytest.raises(UserError, match=r"prompt 2 has 12 tokens.*16 learned positions.*--max-new-tokens 4 or less"):
        stream(model, [[1], prompt], GenerationOptions(max_new_tokens=5))
    with pytest.raises(UserError, match=r"16 learned positions: shorten it"):
        stream(model, [prompt * 2], GenerationOptions(max_new_tokens=1))
    rotary = build(**LLAMA, max_position_embeddings=8)  # have no end
    expected = by_recomputing(rotary, PROMPTS[2], lambda logits, _: logits.argmax(-1))
    assert generate(rotary, [PROMPTS[2]], GREEDY) == [expected]


@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda precision: precision.name)
def test_other_precisions_generate_too(precision: Any) -> None:
    model = tiny_model(single_process_mesh(), precision, init_method_std=0.4, **LLAMA)
    tokens = generate(model, PROMPTS, GREEDY)
    assert all(0 <= token < VOCABULARY for row in tokens for token in row)
    assert [len(row) for row in tokens] == [NEW] * 4


def test_ids_never_come_from_vocabulary_padding() -> None:
    model = build(make_vocab_size_divisible_by=128)
    with torch.no_grad():
        model.output_weight[VOCABULARY:] = 1e6
    flat = GenerationOptions(max_new_tokens=40, temperature=1e6)
    assert max(generate(model, [[1]], flat)[0]) < VOCABULARY


def test_weights_that_are_not_finite_are_reported() -> None:
    model = build()
    with torch.no_grad():
        model.output_weight[5] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        generate(model, [[1]], GREEDY)


SCALED = {"rope_original_max_position_embeddings": 8, "rope_scaling_factor": 4.0}
LONGROPE = {
    **SCALED,
    "position_embedding_type": "longrope",
    "longrope_short_factor": [1.0, 1.1, 1.5, 2.0],
    "longrope_long_factor": [1.5, 2.0, 3.5, 8.0],
}
DYNAMIC = {**SCALED, "position_embedding_type": "dynamic"}


@pytest.mark.parametrize("length", [3, 9, 12])
def test_longrope_generates_what_transformers_does_on_either_side_of_the_original_length(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "short_factor": LONGROPE["longrope_short_factor"],
        "long_factor": LONGROPE["longrope_long_factor"],
    }
    theirs = hf_models.llama_like("Llama", rms_norm_eps=1e-5, num_key_value_heads=2, rope_parameters=parameters)
    theirs = hf_models.in_float64(theirs, monkeypatch)
    ours = build(**{**LLAMA, **LONGROPE})
    hf_models.fill(ours, hf_models.values(theirs, ours))
    prompt = PROMPTS[2][:length]
    new = NEW if length > 8 else 8 - length
    tokens = torch.tensor([prompt])
    ids = theirs.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, do_sample=False, eos_token_id=None
    )
    monkeypatch.setattr(room, "_PREFILL_TOKENS", 4)
    greedy = GenerationOptions(max_new_tokens=new)
    # Beside another prompt, so that it is padded.
    assert generate(ours, [prompt, PROMPTS[2] if length > 8 else [9]], greedy)[0] == ids[0, length:].tolist()


WITH_EXPERTS = ("deepseek", "mixtral", "qwen2 moe", "qwen3 moe")


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(WITH_EXPERTS)])
def test_latents_and_experts_give_the_text_of_transformers(case: str) -> None:
    theirs = model_of(case)
    network = asdict(parse_config(theirs.config.to_dict(), "config.json").model)
    ours = tiny_model(single_process_mesh(), FP32, **network)
    hf_models.fill(ours, hf_models.values(theirs, ours))
    tokens = torch.tensor([PROMPTS[2]])
    how = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "eos_token_id": None}
    ids = theirs.generate(tokens, max_new_tokens=NEW, **how)  # type: ignore[operator]
    assert generate(ours, [PROMPTS[2], PROMPTS[1]], GREEDY)[0] == ids[0, tokens.shape[1] :].tolist()


def test_scaling_by_length_refuses_texts_whose_cached_keys_would_have_to_turn() -> None:
    longrope, dynamic = build(**{**LLAMA, **LONGROPE}), build(**{**LLAMA, **DYNAMIC})
    short, long = PROMPTS[0], PROMPTS[2]
    four, five, one = (GenerationOptions(max_new_tokens=count) for count in (4, 5, 1))
    for model in (longrope, dynamic):
        assert len(generate(model, [short], four)[0]) == 4  # 8 tokens pass through the model
        with pytest.raises(UserError, match=r"prompt 1 has 5 tokens.*so long a text.*use --max-new-tokens 4 or less"):
            generate(model, [short], five)
        assert generate(model, [long], one) == [[int(plain_logits(model, long).argmax())]]
    assert len(generate(longrope, [long], five)[0]) == 5
    with pytest.raises(UserError, match=r"dynamic positions would have.*--max-new-tokens 1 or less, or shorten it"):
        generate(dynamic, [long], five)


def test_the_cache_gives_back_all_that_was_appended_to_a_layer_and_takes_its_memory_once() -> None:
    cache = GenerationCache(tiny_model(single_process_mesh(), BF16, **LLAMA), tokens=7, batch=3)
    appended: dict[int, list[Tensor]] = {0: [], 1: []}
    places = set()
    for count in (4, 1, 2):
        for layer in (0, 1):
            part = torch.randn(count, 3, 2, 8, dtype=torch.bfloat16)
            appended[layer].append(part)
            keys, values = cache.update(layer, part, -part)
            whole = torch.cat(appended[layer])
            assert torch.equal(keys, whole) and torch.equal(values, -whole)
            places |= {x.untyped_storage().data_ptr() for x in (keys, values)}
    assert len(places) == 4
    with pytest.raises(AssertionError, match="cache"):
        cache.update(0, part, part)
