"""`tools/verify_parallel.py` for runs of finetune.py: from its flags to its verdict."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from megalite.checkpoint.huggingface.load import huggingface_to_megalite
from megalite.config.errors import FlagError
from megalite.config.flags import build_parser, parse_namespace, read_run
from megalite.config.schema import RunConfig
from megalite.distributed.pool import ProcessPool
from megalite.models.whole import build_whole
from megalite.verify import report
from megalite.verify.configs import for_proof, resolved
from megalite.verify.layouts import Variant
from megalite.verify.proof import Difference, Prover
from megalite.verify.small import for_matrix, shrink, small_layout
from tests.config.launch_lists import (
    GPT3_175B,
    LLAMA3_8B,
    LLAMA3_8B_SHARDING,
    MIXTRAL_8X7B,
)
from tests.data.chat_files import chat_tokenizer, pairs, write_lines
from tests.helpers import load_tool
from tests.models.hf_models import llama_like
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

    def workers(_: int, preload: list[str]) -> AbstractContextManager[ProcessPool]:
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
    huggingface_to_megalite(base, tmp_path / "run", build_whole)
    given = ["--pretrained-checkpoint", str(tmp_path / "run"), "--use-checkpoint-args", "--sft-data", answers]
    assert tool.main([*RUN.split(), *given, *SPLIT, "--peft", "lora"]) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sft-data", "missing.jsonl"], "no such file"),
        (["--peft", "prefix", "--lora-rank", "3"], "--lora-rank 3 needs --peft lora"),
        (["--num-layers", "7"], "--num-layers 7 contradicts --load-hf"),
        (["--shrink", "--load-adapter", "ADAPTER"], "--load-adapter .* give its kind"),
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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param(
            GPT3_175B,
            "8 processes will start on {cores} CPU cores: TP 2 x PP 4 x DP 1, made smaller from TP 8 x PP 16",
            marks=pytest.mark.full_matrix,
        ),
        (f"{LLAMA3_8B} {LLAMA3_8B_SHARDING}", "2 processes will start on {cores} CPU cores: TP 1 x PP 1 x DP 2\n"),
        pytest.param(
            MIXTRAL_8X7B,
            "8 processes will start on {cores} CPU cores: TP 1 x PP 4 x DP 2 x EP 2, made smaller from",
            marks=pytest.mark.full_matrix,
        ),
    ],
    ids=["GPT-3 175B", "Llama-3 8B", "Mixtral 8x7B"],
)
def test_a_pasted_launch_script_is_proved_in_small(
    tool: ModuleType, flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([*flags.split(), "--shrink", "--steps", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(said.format(cores=os.cpu_count()))
    assert "--save checkpoints, --load checkpoints, --tensorboard-dir" in captured.err
    assert "1 of 2: the layout, 2 steps" in captured.err
    assert "2 of 2: one process, 2 steps" in captured.err


def test_more_processes_than_a_machine_bears_are_refused_unless_asked_for(tool: ModuleType) -> None:
    words = [*GPT3_175B.split(), "--steps", "1"]
    for more in ([], ["--shrink", "--keep-layout"]):
        with pytest.raises(FlagError, match="TP 8 x PP 16 x DP 1 needs 128 processes"):
            tool.main([*words, *more, "--most-processes", "127"])
    with pytest.raises(FlagError, match="--matrix 32 needs 32 processes"):
        tool.main([*words, "--matrix", "32", "--most-processes", "31"])


def test_a_network_beyond_this_machines_memory_is_refused_before_it_starts(tool: ModuleType) -> None:
    with pytest.raises(FlagError, match="GB of memory for 1[67][0-9],.* parameters"):
        tool.main([*GPT3_175B.split(), "--most-processes", "128"])


def test_files_that_are_not_there_are_made_for_a_proof_at_full_size(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = f"--data-path {tmp_path}/none --vocab-file {tmp_path}/vocab.json --merge-file {tmp_path}/merges.txt"
    network = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 64"
    words = f"{RUN} {network} {files} --tensor-model-parallel-size 2 --processes 2 --vocab-size 50 --steps 1"
    assert tool.main(words.split()) == 0
    assert "merges.txt: no such file, so generated data" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    ["--tolerance nan", "--tolerance inf", "--steps 0", "--processes -1", "--matrix 1.5"],
)
def test_numbers_that_would_prove_nothing_are_refused(tool: ModuleType, words: str) -> None:
    with pytest.raises(FlagError, match=words.split()[0]):
        tool.main([*RUN.split(), *words.split()])


@pytest.mark.parametrize("tp, groups, heads", [(2, 8, 32), (8, 8, 8), (16, 8, 48), (24, 8, 24), (8, 1, 32), (3, 6, 12)])
@pytest.mark.parametrize("stages", ["", "--pipeline-model-parallel-size 16 --decoder-first-pipeline-num-layers 2"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_shrunk_run_keeps_what_its_layout_shows(tp: int, groups: int, heads: int, stages: str, keep: bool) -> None:
    words = (
        f"{RUN} --num-layers 92 --hidden-size {8 * heads} --num-attention-heads {heads} --group-query-attention "
        f"--max-position-embeddings 96 --seq-length 96 --num-query-groups {groups} --ffn-hidden-size 192 "
        f"--tensor-model-parallel-size {tp} {stages} --mock-data --tokenizer-type NullTokenizer --vocab-size 50"
    )
    config = read_run(parse_namespace(build_parser("p", "d"), words.replace("--steps 2", "").split())[0])
    layout = None if keep else small_layout(config)
    pp = config.layout.pipeline_model_parallel_size
    small = shrink(resolved(for_proof(config, 2), tp * pp), 1, layout=layout)
    cut = small.layout
    resolved(small, cut.tensor_model_parallel_size * cut.pipeline_model_parallel_size)
    assert (cut.tensor_model_parallel_size > small.model.num_query_groups) == (tp > groups)
    assert (cut.tensor_model_parallel_size <= 4 and cut.pipeline_model_parallel_size <= 4) or keep
    assert (cut.pipeline_model_parallel_size > 1) == (pp > 1)
    assert cut.decoder_first_pipeline_num_layers == (1 if stages else None)


@pytest.mark.parametrize(
    ("edges", "pp", "kept"), [("1 1", 1, (1, 0)), ("0 9", 1, (0, 1)), ("4 4", 2, (1, 1)), ("2 1", 2, (2, 1))]
)
def test_a_small_network_keeps_a_layer_in_fp8_beside_those_without(edges: str, pp: int, kept: tuple[int, int]) -> None:
    start, end = edges.split()
    words = (
        f"{RUN} --num-layers 32 --hidden-size 64 --num-attention-heads 2 --max-position-embeddings 96 --mock-data "
        f"--tokenizer-type NullTokenizer --vocab-size 50 --pipeline-model-parallel-size {pp} --fp8-format hybrid "
        f"--first-last-layers-bf16 --num-layers-at-start-in-bf16 {start} --num-layers-at-end-in-bf16 {end}"
    )
    proof = for_proof(read_run(parse_namespace(build_parser("p", "d"), words.replace("--steps 2", "").split())[0]), 2)
    variant = Variant(pp=pp, chunks=pp)
    for small in (shrink(resolved(proof, pp), 1), variant.apply(for_matrix(proof, variant))):
        precision = resolved(small, pp).precision
        assert (precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16) == kept


def test_a_small_layout_that_gathers_nothing_does_without_gathers_in_fp8() -> None:
    words = (
        f"{RUN} --num-layers 4 --hidden-size 64 --num-attention-heads 2 --max-position-embeddings 96 --mock-data "
        "--tokenizer-type NullTokenizer --vocab-size 50 --fp8-format hybrid --fp8-param-gather "
        "--use-distributed-optimizer"
    )
    proof = for_proof(read_run(parse_namespace(build_parser("p", "d"), words.replace("--steps 2", "").split())[0]), 2)
    for ranks, sharding in ((1, "no_shard"), (2, "optim")):
        variant = Variant(dp=ranks, sharding=sharding)
        for small in (shrink(resolved(proof, ranks), ranks), variant.apply(for_matrix(proof, variant))):
            assert resolved(small, ranks).precision.fp8_param_gather == (ranks > 1)
