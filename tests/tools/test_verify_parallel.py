"""`tools/verify_parallel.py` for runs of finetune.py: from its flags to its verdict."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from megalite.checkpoint.huggingface.convert import huggingface_to_megalite
from megalite.config.errors import FlagError
from megalite.config.schema import RunConfig
from megalite.distributed.pool import ProcessPool
from megalite.verify import report
from megalite.verify.compare import Difference
from megalite.verify.proof import Prover
from tests.data.chat_files import chat_tokenizer, pairs, write_lines
from tests.helpers import load_tool
from tests.models.hf_models import llama_like
from tests.tools.test_merge_adapter import build_model
from tests.verify.test_planted_faults import no_copy_sums

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "verify_parallel.py"
RUN = "--seq-length 64 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 100 --bf16 --steps 2"
SPLIT = ["--processes", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"]


class FaultyProver(Prover):
    """A prover whose layouts leave the gradients of copies partial."""

    def prove(self, config: RunConfig, world_size: int, **_: object) -> Difference:
        return super().prove(config, world_size, tracer=no_copy_sums)


@pytest.fixture
def tool(pool: ProcessPool, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with the session's workers."""

    def workers(_: int) -> AbstractContextManager[ProcessPool]:
        return nullcontext(pool)

    monkeypatch.setattr(report, "ProcessPool", workers)
    return load_tool(SCRIPT)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    llama_like("Llama", num_key_value_heads=2, vocab_size=431).save_pretrained(folder)  # type: ignore[operator]
    return chat_tokenizer(folder)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_lines(tmp_path_factory.mktemp("data") / "sft.jsonl", pairs(20))


def _flags(base: Path, answers: str, *more: str) -> list[str]:
    return [*RUN.split(), "--load-hf", str(base), "--sft-data", answers, *more]


def test_lora_on_a_model_of_the_users_is_proved(
    tool: ModuleType, base: Path, answers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.json"
    more = ["--sft-packing", "--peft", "lora", "--save-adapter", str(tmp_path / "adapter"), "--json", str(table)]
    assert tool.main(_flags(base, answers, *SPLIT, *more)) == 0
    (row,) = json.loads(table.read_text())
    assert row["equal"]
    assert len(row["gradients"]) == 2 * 4 * 2  # layers, targets, A and B
    assert "EQUAL within 1e-10" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def test_a_missing_sum_of_a_replicated_factors_gradient_is_no_proof(
    tool: ModuleType, base: Path, answers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "Prover", FaultyProver)
    table = tmp_path / "table.json"
    assert tool.main(_flags(base, answers, *SPLIT, "--peft", "lora", "--json", str(table))) == 1
    (row,) = json.loads(table.read_text())
    wrong = {name.split(".", 3)[3] for name, value in row["gradients"].items() if value > 1e-3}
    assert wrong == {f"self_attention.linear_qkv.lora.{part}_proj.a" for part in "qkv"} | {
        "self_attention.linear_proj.lora.o_proj.b"
    }


@pytest.mark.parametrize(
    "more",
    [
        ["--peft", "prefix", "--pipeline-model-parallel-size", "2"],
        ["--peft", "none", "--sft-packing", "--data-parallel-sharding-strategy", "optim_grads_params"],
        ["--shrink", "--peft", "prompt", "--prompt-init-text", "answer", *SPLIT[2:]],
        ["--shrink", "--task", "classification", "--peft", "lora", "--tensor-model-parallel-size", "2"],
        ["--matrix", "2", "--peft", "lora", "--sft-packing"],
    ],
    ids=lambda words: " ".join(words),
)
def test_what_is_learnt_and_how_is_as_in_the_run(tool: ModuleType, base: Path, answers: str, more: list[str]) -> None:
    assert tool.main(_flags(base, answers, "--processes", "2", *more)) == 0


def test_a_run_from_a_checkpoint_is_proved(tool: ModuleType, base: Path, answers: str, tmp_path: Path) -> None:
    huggingface_to_megalite(base, tmp_path / "run", build_model)
    given = ["--pretrained-checkpoint", str(tmp_path / "run"), "--use-checkpoint-args", "--sft-data", answers]
    assert tool.main([*RUN.split(), *given, *SPLIT, "--peft", "lora"]) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sft-data", "missing.jsonl"], "no such file"),
        (["--peft", "prefix", "--lora-rank", "3"], "--lora-rank 3 needs --peft lora"),
        (["--num-layers", "7"], "--num-layers 7 contradicts --load-hf"),
        (["--shrink", "--load-adapter", "ADAPTER"], "--load-adapter .* name its kind"),
        (["--load-adapter", "missing"], "adapter_config.json"),
    ],
)
def test_bad_flags_are_told_before_any_process_starts(
    tool: ModuleType, base: Path, answers: str, more: list[str], message: str, tmp_path: Path
) -> None:
    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(FlagError, match=message):
        tool.main(_flags(base, answers, *(str(tmp_path) if word == "ADAPTER" else word for word in more)))
