"""Checkpoints that hold an adapter alone: what must be named beside them, and what differs from the run before."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megalite.checkpoint.errors import CheckpointError
from megalite.config.errors import FlagError, UserError
from megalite.config.schema import RunConfig, TokenizerConfig
from megalite.config.schema_finetune import PeftConfig
from megalite.data.tokenizers import HuggingFaceTokenizer
from megalite.distributed.mesh import single_process_mesh
from megalite.peft.adapter import AdapterSaver
from megalite.peft.files import read_adapter, read_class_names, write_adapter
from megalite.training.loop import Loop
from tests.data.chat_files import CHATML_TEMPLATE, SPECIAL, chat_tokenizer, write_lines
from tests.peft.runs import adapter_config, build


def start(config: RunConfig, *, save: Path | None = None) -> None:
    if save is not None:
        config.checkpoint.save = str(save)
    run = build(config)
    run.trainer.step()
    run.save()
    run.close()


def test_a_template_that_goes_during_the_run_is_still_with_the_adapter_and_beside_the_checkpoint(
    tmp_path: Path,
) -> None:
    tokenizer, template = chat_tokenizer(tmp_path / "tokenizer"), tmp_path / "template.jinja"
    template.write_text(CHATML_TEMPLATE, "utf-8")
    config = adapter_config("lora", save_adapter=str(tmp_path / "lora"))
    config.checkpoint.save = str(tmp_path / "run")
    config.data.mock_data = False
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    config.tokenizer = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tokenizer))
    config.finetune.task, config.finetune.chat_template = "sft", str(template)
    config.data.seq_length = 32
    config.finetune.sft_data = [write_lines(tmp_path / "chats.jsonl", [{"messages": messages}] * 2)]
    run = build(config)
    template.unlink()
    shutil.rmtree(tokenizer)
    run.save()
    run.close()
    for folder in (tmp_path / "lora", tmp_path / "run" / "huggingface"):
        assert (folder / "chat_template.jinja").read_text("utf-8") == CHATML_TEMPLATE
        assert HuggingFaceTokenizer(str(folder)).special.keys() == set(SPECIAL)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in `model`, and a LoRA beside it in `lora`."""
    folder = tmp_path_factory.mktemp("runs")
    start(adapter_config("none"), save=folder / "model")
    start(adapter_config("lora", pretrained_checkpoint=str(folder / "model")), save=folder / "lora")
    return folder


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("lora", {"load": "lora"}, "holds an adapter alone, trained with --pretrained-checkpoint .*: give that too"),
        (
            "lora",
            {"load": "lora", "pretrained_checkpoint": "none"},
            "--pretrained-checkpoint .*none holds no checkpoint",
        ),
        (
            "prompt",
            {"load": "lora", "pretrained_checkpoint": "model"},
            "is of a run with --peft lora, and this one has",
        ),
        ("none", {"load": "lora"}, "holds only what a run with --peft lora trained beside a model"),
        ("none", {"pretrained_checkpoint": "lora"}, "holds only what a run with --peft lora trained"),
        ("lora", {"pretrained_checkpoint": "lora"}, "holds only what a run with --peft lora trained"),
        ("lora", {"load": "model"}, "is of a run with --peft none, and this one has --peft lora; a checkpoint of the"),
    ],
)
def test_what_does_not_go_together_is_told(kind: str, values: dict[str, str], message: str, folders: Path) -> None:
    with pytest.raises(UserError, match=message):
        start(adapter_config(kind, **{name: str(folders / folder) for name, folder in values.items()}))


def test_what_changes_the_adapter_or_its_model_is_told(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folders / "model", tmp_path / "moved")
    base: dict[str, Any] = {"load": str(folders / "lora"), "pretrained_checkpoint": str(folders / "model")}
    start(adapter_config("lora", **base))
    assert "replaces the checkpoint's" not in capsys.readouterr().out
    start(adapter_config("lora", **base | {"lora_alpha": 5.0, "pretrained_checkpoint": str(tmp_path / "moved")}))
    said = capsys.readouterr().out
    assert "--lora-alpha 5.0 replaces the checkpoint's --lora-alpha 32" in said
    assert f"moved replaces the checkpoint's --pretrained-checkpoint {folders / 'model'}" in said


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_rank": 4}, "was trained with --lora-rank 3, and this run has --lora-rank 4"),
        ({"lora_target_modules": ["q_proj"]}, "was trained with .*, and this run has --lora-target-modules q_proj"),
    ],
)
def test_another_shape_of_the_adapter_is_told_by_its_flag(values: dict[str, Any], message: str, folders: Path) -> None:
    given = {"load": str(folders / "lora"), "pretrained_checkpoint": str(folders / "model")}
    with pytest.raises(UserError, match=message):
        start(adapter_config("lora", **given, **values))


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "kill"])
def test_a_save_that_fails_leaves_the_last_good_adapter(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("of the run")
    write_adapter(tmp_path, {"peft_type": "LORA", "r": 1, "lora_alpha": 4}, {"w": torch.ones(1)}, ["yes", "no"])

    def fails(*_: object, **__: object) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr("megalite.peft.files.write_small_files", fails)
        with pytest.raises((UserError, KeyboardInterrupt)):
            write_adapter(tmp_path, {"peft_type": "LORA", "r": 1, "lora_alpha": 64}, {"w": torch.full((1,), 2.0)})
    adapter = read_adapter(tmp_path)
    assert (adapter.config["lora_alpha"], adapter.tensors["w"].item()) == (4, 1.0)
    assert read_class_names(tmp_path) == ("yes", "no")
    write_adapter(tmp_path, {"peft_type": "LORA", "r": 1, "lora_alpha": 64}, {"w": torch.full((1,), 2.0)})
    assert read_adapter(tmp_path).config["lora_alpha"] == 64
    assert read_class_names(tmp_path) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "log",
    ]


@pytest.mark.parametrize("background", [False, True])
def test_the_adapter_is_there_although_the_checkpoint_could_not_be_saved(
    background: bool, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise CheckpointError("No space left on device")

    monkeypatch.setattr("megalite.checkpoint.saver.write_and_commit", full)
    config = adapter_config("lora", pretrained_checkpoint=str(folders / "model"), save_adapter=str(tmp_path / "lora"))
    config.checkpoint.async_save = background
    with pytest.raises(CheckpointError, match="No space left"):
        start(config, save=tmp_path / "run")
    assert {path.name for path in (tmp_path / "lora").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_an_adapter_that_is_written_in_the_background_holds_its_own_step(tmp_path: Path) -> None:
    found = []
    for background in (False, True):
        config = adapter_config("lora", save_adapter=str(tmp_path / str(background)))
        config.checkpoint.async_save, config.checkpoint.save = background, str(tmp_path / f"run{background}")
        run = build(config)
        run.trainer.step()
        run.save()
        run.trainer.step()
        run.close()
        found.append(read_adapter(config.peft.save_adapter or "").tensors)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_best_adapter_that_cannot_be_saved_names_its_own_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise CheckpointError("No space left on device")

    monkeypatch.setattr("megalite.peft.adapter.write_adapter", full)
    config = adapter_config("lora", save_best_adapter=str(tmp_path / "best"))
    config.data.split, config.validation.eval_iters = "9,1,0", 1
    run = build(config)
    with pytest.raises(CheckpointError, match=f"--save-best-adapter {tmp_path}/best: No space left"):
        Loop(run).validated(1.0)
    run.close()


@pytest.mark.parametrize("flag", ["--save-adapter", "--save-best-adapter"])
def test_an_adapter_is_not_saved_into_a_model_s_folder(flag: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FlagError, match=f"{flag} .* is a model's folder"):
        start(adapter_config("lora", **{flag[2:].replace("-", "_"): str(tmp_path)}))


def test_more_microbatches_than_a_schedule_can_list_are_refused() -> None:
    config = adapter_config("none")
    config.training.global_batch_size = 1 << 31
    with pytest.raises(FlagError, match="at most 65,536 are possible"):
        start(config)


def test_the_best_loss_of_an_earlier_run_counts_only_where_its_adapter_is(tmp_path: Path) -> None:
    said: list[str] = []
    plan = SimpleNamespace(peft=PeftConfig(save_best_adapter=str(tmp_path)))
    optimizer = SimpleNamespace(mesh=single_process_mesh())
    saver = AdapterSaver(
        cast(Any, plan), cast(Any, optimizer), None, classes=None, beside={}, saver=cast(Any, None), say=said.append
    )
    assert saver.standing_best(4.7) is None
    assert f"--save-best-adapter {tmp_path} holds no adapter" in said[0]
    (tmp_path / "adapter_config.json").write_text("{}")
    assert saver.standing_best(4.7) == 4.7


@pytest.mark.parametrize("changed", [{"fp8_format": None, "fp8_backend": "auto"}, {"load_optim": False}], ids=str)
def test_fp8_histories_of_frozen_layers_stand_in_nobodys_way(changed: dict[str, Any], tmp_path: Path) -> None:
    """An adapter's checkpoint has them, though it doesn't have the layers' weights."""
    fp8 = {"fp8_format": "hybrid", "fp8_backend": "emulated"}
    start(adapter_config("lora", **fp8), save=tmp_path)
    start(adapter_config("lora", load=str(tmp_path), **(fp8 | changed)))
