"""The `config.json` of public models of the six families, in small: each gives the logits of `transformers`, or is
refused for the reason that the data file states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.config import parse_config
from megalite.config.schema import PrecisionConfig, RunConfig
from megalite.distributed.mesh import single_process_mesh
from megalite.models.whole import build_whole, outputs
from tests.models import hf_models

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_configs.json").read_text())
LOADED = [name for name, entry in PUBLISHED.items() if entry["refused"] is None]
ROWS = 131


def shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """Two layers, narrow heads in the same groups, few ids; the length of positions stays where they are computed."""
    small = {**values, "vocab_size": ROWS}
    small |= {name: 0 for name in values if name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if values["model_type"] == "gpt2":
        inner = {} if "n_inner" not in values else {"n_inner": 48}
        return {**small, **inner, "n_embd": 8 * values["n_head"], "n_layer": 2, "n_positions": 64}
    heads = values["num_attention_heads"]
    width = {"head_dim": 8} if "head_dim" in values else {}
    sizes = {"hidden_size": 8 * heads, "intermediate_size": 48, "num_hidden_layers": 2}
    return {**small, **sizes, **width}


@pytest.mark.parametrize("name", LOADED)
def test_a_published_model_gives_the_logits_of_transformers(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = shrunk(PUBLISHED[name]["config"])
    kind = values["model_type"]
    given = {field: value for field, value in values.items() if field != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given), dtype=torch.float32).eval()
    hf_models.randomize(model)
    found = parse_config(values, "config.json")
    config = RunConfig(model=found.model, precision=PrecisionConfig())
    ours = build_whole(config, found.vocab_size, single_process_mesh()).eval()
    hf_models.fill(ours, hf_models.values(model, ours))
    tokens = torch.randint(ROWS, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens).logits
        difference = (outputs(ours, tokens, torch.arange(48)) - expected).abs().max()
    assert difference <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in LOADED])
def test_a_published_model_that_is_not_supported_is_refused_for_the_stated_reason(name: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        parse_config(PUBLISHED[name]["config"], "config.json")
    assert PUBLISHED[name]["refused"] in str(raised.value)
