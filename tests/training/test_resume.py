"""A resumed run goes on with numbers that can be true, on the data that it began with, or says so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.storage import CHECKSUMS
from megalite.config.errors import FlagError
from megalite.config.resolve import resolve
from megalite.config.schema import RunConfig
from megalite.distributed.launch import Environment
from megalite.training.prepare import prepare_config
from tests.data.token_files import write_tokens
from tests.peft.runs import adapter_config, build

STEPS = 3


def go(config: RunConfig, steps: int = STEPS) -> None:
    run = build(config)
    for _ in range(steps):
        run.trainer.step()
    run.save()
    run.close()


def config_of(folder: Path, **fields: Any) -> RunConfig:
    return adapter_config("none", save=str(folder / "run"), load=str(folder / "run"), **fields)


def edit(folder: Path, **numbers: Any) -> None:
    """Change the training state as an editor would, who deletes the checksums."""
    path = folder / "run" / f"iter_{STEPS:07d}" / "training_state.json"
    values = json.loads(path.read_text())
    values["training"] |= numbers
    path.write_text(json.dumps(values))
    path.with_name(CHECKSUMS).unlink(missing_ok=True)


def test_numbers_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    go(config_of(tmp_path))  # 3 steps of 4 samples
    for numbers, message in [
        ({"consumed_samples": 8, "schedule_samples": 8}, "consumed_samples is 8, but .* iteration 3 ends at 12"),
        ({"consumed_samples": 12, "schedule_samples": 13}, "don't ascend"),
        ({"schedule_samples": 12, "skipped": 4}, "skipped 4 .* of iteration 3"),
        ({"skipped": "0"}, "skipped is '0', not a whole number"),
        ({"skipped": 0, "iteration": 2}, "the iteration is 2, but the folder is iter_0000003"),
    ]:
        edit(tmp_path, **numbers)
        with pytest.raises(CheckpointError, match=f"(?s)training_state.json.*{message}"):
            go(config_of(tmp_path), 0)
    edit(tmp_path, iteration=STEPS)
    go(config_of(tmp_path), 1)


def test_a_batch_size_that_was_changed_on_the_way_is_no_contradiction(tmp_path: Path) -> None:
    go(config_of(tmp_path))
    go(config_of(tmp_path, global_batch_size=8), 1)
    go(config_of(tmp_path, global_batch_size=8), 1)
    path = tmp_path / "run" / "iter_0000005" / "training_state.json"
    assert json.loads(path.read_text())["training"]["consumed_samples"] == 3 * 4 + 2 * 8


def test_data_that_was_made_anew_is_told_on_resuming(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [[n % 100] * (40 + n) for n in range(40)]
    prefix = write_tokens(tmp_path / "data", documents)
    given: dict[str, Any] = {"data_path": [prefix], "split": "1", "mock_data": False, "eval_iters": 0}
    go(config_of(tmp_path, **given))
    go(config_of(tmp_path, **given), 0)
    assert "has changed since" not in capsys.readouterr().out
    write_tokens(tmp_path / "data", documents[1:])
    go(config_of(tmp_path, **given), 0)
    assert f"note: {prefix}.idx has changed since {tmp_path}/run/iter_0000003 was saved" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"swiglu": False, "qk_layernorm": False}, None),
        ({"ffn_hidden_size": 128}, "the checkpoint has --ffn-hidden-size 96"),
        ({"vocab_size": 300}, "another tokenizer or --vocab-size"),
        ({"num_query_groups": 4}, "the checkpoint has --num-query-groups 2"),  # as many elements, cut otherwise
    ],
)
def test_the_cause_of_other_shapes_is_named_only_where_it_is_known(
    changed: dict[str, Any], cause: str | None, tmp_path: Path
) -> None:
    go(config_of(tmp_path), 1)
    with pytest.raises(CheckpointError, match="other shapes") as raised:
        go(config_of(tmp_path, **changed), 0)
    found = re.search(r"Likely cause: (.*)\.", str(raised.value))
    assert (None if found is None else found[1]) == cause
    assert "--swiglu" in str(raised.value) and "--normalization RMSNorm" in str(raised.value)


def test_a_folder_of_another_kind_is_no_reason_to_start_fresh(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(FlagError, match=f"did you mean --load-hf {tmp_path}/run"):
        prepare_config(resolve(config_of(tmp_path), 1), Environment())


def test_fp8_histories_of_another_length_start_anew_and_the_note_names_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fp8 = {"fp8_format": "hybrid", "fp8_backend": "emulated"}
    go(config_of(tmp_path, fp8_amax_history_len=3, **fp8), 1)
    for length, told in ((3, False), (2, True)):
        capsys.readouterr()
        go(config_of(tmp_path, fp8_amax_history_len=length, **fp8), 0)
        layers = 4 * config_of(tmp_path).model.num_layers
        note = f"has no FP8 history of --fp8-amax-history-len {length} for {layers} linear layers: it starts anew there"
        assert (note in capsys.readouterr().out) == told
