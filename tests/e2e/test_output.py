"""What a run of two processes with everything switched on reports: log lines, metrics, TensorBoard, timeline, trace."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.runs import MICRO, Outcome, evaluations, program, run, steps

# The fields in the order in which Megatron-LM writes them.
STEP_LINE = re.compile(
    r"^ \[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6})\] iteration +(?P<iteration>\d+)/ +(?P<total>\d+) \|"
    r" consumed samples: +(?P<samples>\d+) \|"
    r" elapsed time per iteration \(ms\): (?P<elapsed>\d+\.\d) \|"
    r"( throughput per GPU \(TFLOP/s/GPU\): (?P<throughput>\d+\.\d+) \|)?"
    r" learning rate: (?P<rate>\d\.\d{6}E[+-]\d\d) \|"
    r" global batch size: +(?P<batch>\d+) \|"
    r"( lm loss: (?P<loss>\d\.\d{6}E[+-]\d\d) \|)?"
    r" loss scale: (?P<scale>\d+\.\d) \|"
    r" grad norm: (?P<norm>\d+\.\d{3}) \|"
    r"( num zeros: (?P<zeros>\d+) \|)?"
    r"( params norm: (?P<params>\d+\.\d{3}) \|)?"
    r" number of skipped iterations: +(?P<skipped>\d+) \|"
    r" number of nan iterations: +(?P<nans>\d+) \|$"
)
EVALUATION_LINES = re.compile(
    r"^(-+)\n (?P<split>\w+) loss at iteration (?P<iteration>\d+) \| lm loss value: (?P<loss>\d\.\d{6}E[+-]\d\d) \|"
    r" lm loss PPL: (?P<ppl>\d\.\d{6}E[+-]\d\d) \| \n\1$",
    re.MULTILINE,
)
STEPS = 7
PARAMETERS = 28000  # 47 x 32 + 32 x 32 + 2 x (3 x 32 x 33 + 32 x 33 + 128 x 33 + 32 x 129 + 4 x 32) + 2 x 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("output")


@pytest.fixture(scope="module")
def outcome(folder: Path) -> Outcome:
    return run(
        f"{MICRO} --train-iters {STEPS} --global-batch-size 8 --log-interval 3 --eval-iters 2 --eval-interval 4 "
        f"--metrics-file {folder}/metrics.jsonl --tensorboard-dir {folder}/tb --log-memory-to-tensorboard "
        "--log-throughput --log-params-norm --log-num-zeros-in-grad --timing-log-level 2 "
        f"--timeline {folder}/timeline "
        "--lr-decay-style linear --lr-warmup-iters 2 --data-parallel-sharding-strategy optim --overlap-grad-reduce "
        "--overlap-param-gather --ddp-bucket-size 5000 --log-memory --log-top-grad-norms 2",
        processes=2,
    )


@pytest.fixture(scope="module")
def lines(outcome: Outcome) -> list[dict[str, Any]]:
    matches = [STEP_LINE.match(line) for line in outcome.out.splitlines() if "elapsed time per iteration" in line]
    assert all(matches), outcome.out
    return [match.groupdict() for match in matches if match]


def test_the_first_step_and_multiples_of_the_interval_are_logged_once(lines: list[dict[str, Any]]) -> None:
    assert [int(line["iteration"]) for line in lines] == [1, 3, 6]
    assert {int(line["total"]) for line in lines} == {STEPS}


def test_a_log_line_holds_the_means_since_the_last_one(
    lines: list[dict[str, Any]], outcome: Outcome, folder: Path
) -> None:
    recorded = steps(folder / "metrics.jsonl")
    for line, first in zip(lines, (0, 1, 3), strict=True):
        last = int(line["iteration"])
        covered = recorded[first:last]
        assert float(line["loss"]) == pytest.approx(sum(s["lm_loss"] for s in covered) / len(covered), rel=1e-6)
        mean = sum(s["elapsed_ms"] for s in covered) / len(covered)
        assert float(line["elapsed"]) == pytest.approx(mean, abs=0.06)
        step = recorded[last - 1]
        assert float(line["norm"]) == pytest.approx(step["grad_norm"], abs=6e-4)
        assert float(line["rate"]) == pytest.approx(step["learning_rate"], rel=1e-6)
        assert int(line["samples"]) == step["consumed_samples"] == 8 * last
        assert int(line["batch"]) == step["global_batch_size"] == 8
        assert float(line["params"]) == pytest.approx(step["params_norm"], abs=6e-4)
        assert int(line["zeros"]) == step["num_zeros"]
        assert (int(line["skipped"]), int(line["nans"]), float(line["scale"])) == (0, 0, 1.0)
        assert float(line["throughput"]) >= 0


def test_evaluations_are_printed_between_dashed_lines(outcome: Outcome, folder: Path) -> None:
    printed = [match.groupdict() for match in EVALUATION_LINES.finditer(outcome.out)]
    recorded = evaluations(folder / "metrics.jsonl")
    names = {"valid": "validation", "test": "test"}
    assert [(p["split"], int(p["iteration"])) for p in printed] == [
        (names[r["split"]], r["iteration"]) for r in recorded
    ]
    assert [(r["split"], r["iteration"]) for r in recorded] == [("valid", 4), ("valid", 7), ("test", 7)]
    for text, record in zip(printed, recorded, strict=True):
        assert float(text["loss"]) == pytest.approx(record["lm_loss"], rel=1e-6)
        assert float(text["ppl"]) == pytest.approx(record["ppl"], rel=1e-6)
        assert record["ppl"] == pytest.approx(2.718281828459045 ** record["lm_loss"], rel=1e-12)


def test_the_metrics_file_has_the_promised_fields_in_full_precision(outcome: Outcome, folder: Path) -> None:
    recorded = steps(folder / "metrics.jsonl")
    assert [step["iteration"] for step in recorded] == list(range(1, STEPS + 1))
    promised = (
        "iteration consumed_samples consumed_tokens lm_loss grad_norm learning_rate loss_scale skipped "
        "global_batch_size elapsed_ms tokens_per_second tflops_per_device"
    )
    for step in recorded:
        assert set(promised.split()) <= set(step)
        assert step["consumed_tokens"] == 32 * step["consumed_samples"]
        assert step["skipped"] is False
        assert step["tokens_per_second"] == pytest.approx(8 * 32 / (step["elapsed_ms"] / 1e3), rel=1e-9)
    assert [step["learning_rate"] for step in recorded] == pytest.approx(
        [0, 5e-4, *(1e-3 * (7 - k) / 5 for k in range(2, 7))], rel=1e-12
    )
    text = (folder / "metrics.jsonl").read_text()
    for line in text.splitlines():
        values = json.loads(line)
        assert all(repr(value) in line for value in values.values() if isinstance(value, float))
    assert any(len(repr(step["lm_loss"])) > 12 for step in recorded)


def test_tensorboard_has_megatrons_tags_and_the_metrics_values(outcome: Outcome, folder: Path) -> None:
    assert len(list((folder / "tb").glob("events.out.tfevents.*"))) == 1
    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    tags = {
        "lm loss": "lm_loss",
        "learning-rate": "learning_rate",
        "grad-norm": "grad_norm",
        "batch-size": "global_batch_size",
        "loss-scale": "loss_scale",
        "throughput": "tflops_per_device",
        "params-norm": "params_norm",
        "num-zeros": "num_zeros",
    }
    others = {"iteration-time", "mem-allocated-bytes"}
    validation = {f"lm loss {split}{end}" for split in ("validation", "test") for end in ("", " ppl")}
    assert set(events.Tags()["scalars"]) == set(tags) | others | validation
    recorded = steps(folder / "metrics.jsonl")
    for tag, name in tags.items():
        assert [(e.step, e.value) for e in events.Scalars(tag)] == [
            (step["iteration"], pytest.approx(step[name], rel=1e-6)) for step in recorded
        ]
    for event, step in zip(events.Scalars("iteration-time"), recorded, strict=True):
        assert event.value == pytest.approx(step["elapsed_ms"] / 1e3, rel=1e-6)
    assert all(event.value > 1e6 for event in events.Scalars("mem-allocated-bytes"))
    assert [event.step for event in events.Scalars("lm loss validation")] == [4, 7]


def test_every_rank_writes_a_timeline_of_its_training_actions(outcome: Outcome, folder: Path) -> None:
    for rank in (0, 1):
        actions = [json.loads(line) for line in (folder / "timeline" / f"rank_{rank}.jsonl").read_text().splitlines()]
        assert all(set(action) == {"kind", "chunk", "microbatch", "start_ms", "end_ms"} for action in actions)
        expected = [(kind, 0, m) for _ in range(STEPS) for m in (0, 1) for kind in ("forward", "backward")]
        assert [(a["kind"], a["chunk"], a["microbatch"]) for a in actions] == expected
        times = [time for action in actions for time in (action["start_ms"], action["end_ms"])]
        assert times == sorted(times)


def test_overlapped_reductions_start_before_the_last_backward_ends(outcome: Outcome, folder: Path) -> None:
    def read(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / "timeline" / name).read_text().splitlines()]

    backwards = [action for action in read("rank_0.jsonl") if action["kind"] == "backward"]
    last = [backwards[2 * step + 1] for step in range(STEPS)]
    reductions = [line for line in read("collectives_0.jsonl") if line["kind"] == "reduce_scatter"]
    buckets = len({line["bucket"] for line in reductions})
    assert buckets > 3 and len(reductions) == buckets * STEPS
    for number, backward in enumerate(last):
        mine = reductions[number * buckets : (number + 1) * buckets]
        assert backward["start_ms"] < mine[0]["start_ms"] < backward["end_ms"]


def test_memory_is_told_once_measured_and_predicted(outcome: Outcome) -> None:
    table = outcome.out.split("memory after the first step")[1].splitlines()[1:5]
    assert [line.split()[0] for line in table] == ["rank", "0", "1", "predicted"]
    held = [re.findall(r"([\d.]+) (k|M)?B", line) for line in table[1:]]
    in_bytes = [[float(number) * {"k": 1e3, "M": 1e6, "": 1}[unit] for number, unit in row] for row in held]
    assert in_bytes[0][:4] == in_bytes[1][:4]
    for measured, predicted in zip(in_bytes[0][:4], in_bytes[2][:4], strict=True):
        assert predicted <= measured <= 1.3 * predicted  # padding of a tiny network
    assert in_bytes[0][5] == pytest.approx(in_bytes[2][5], rel=0.3)


def test_the_largest_gradient_norms_are_told_with_each_log_line(outcome: Outcome, folder: Path) -> None:
    told = [line for line in outcome.out.splitlines() if line.startswith(" largest gradient norms |")]
    assert len(told) == 3  # after steps 1, 3 and 6
    for line, step in zip(told, [steps(folder / "metrics.jsonl")[i] for i in (0, 2, 5)], strict=True):
        norms = step["largest_grad_norms"]
        assert list(norms.values()) == sorted(norms.values(), reverse=True)
        assert len(norms) == 2 and all(0 < norm <= step["grad_norm"] for norm in norms.values())
        assert all(f"{name}: {norm:.4f}" in line for name, norm in norms.items())


@pytest.mark.parametrize(("end", "last"), [(4, 5), pytest.param(9, 3, id="the run ends first", marks=pytest.mark.slow)])
def test_the_profile_covers_the_steps_asked_for(end: int, last: int, tmp_path: Path) -> None:
    """In a process of its own: torch's profiler starts threads, which a fork doesn't bear at all times."""
    steps = f"--train-iters {last} --profile-step-start 2 --profile-step-end {end}"
    outcome = program(f"{MICRO} {steps} --profile --tensorboard-dir {tmp_path}")
    trace = json.loads((tmp_path / "rank_0.json").read_text())
    names = Counter(event.get("name") for event in trace["traceEvents"])
    optimizer_steps = sum(count for name, count in names.items() if str(name).startswith("Optimizer.step"))
    assert optimizer_steps == 2  # of steps 2 and 3
    assert [line for line in outcome.err.splitlines() if line and "Profiler" not in line] == []


def test_timers_are_reported_with_the_log_lines(outcome: Outcome) -> None:
    timed = [line for line in outcome.out.splitlines() if line.startswith(" time per iteration (ms)")]
    assert len(timed) == 2  # after steps 3 and 6
    for name in ("forward-backward", "optimizer", "batch-generator", "grad-norm", "all-grads-sync"):
        assert all(re.search(rf"\| {name}: \d+\.\d\d", line) for line in timed)


def test_the_opening_block_says_what_the_run_is(outcome: Outcome) -> None:
    assert outcome.out.count("=" * 80) == 2
    block = outcome.out.split("=" * 80)[1]
    assert f"parameters: {PARAMETERS:,} in all, {PARAMETERS:,} on this rank" in block
    assert "TP 1 x PP 1 x DP 2" in block and "2 processes on cpu" in block
    assert "fp32" in block
    assert "predicted memory per rank" in outcome.out.split("=" * 80)[0], "before the model is built"
    assert "8 sequences of 32 tokens" in block


def test_the_end_says_what_was_trained_how_fast_and_in_how_much_memory(outcome: Outcome, folder: Path) -> None:
    (line,) = (line for line in outcome.out.splitlines() if line.startswith("trained "))
    found = re.fullmatch(
        r"trained (\d+) steps of ([\d,]+) tokens in ([\d.]+) s: ([\d,]+) tokens/s; peak memory per process (.+) MB",
        line,
    )
    assert found is not None, line
    recorded = steps(folder / "metrics.jsonl")
    assert int(found[1]) == STEPS and int(found[2].replace(",", "")) == recorded[-1]["consumed_tokens"]
    assert float(found[3]) == pytest.approx(sum(step["elapsed_ms"] for step in recorded) / 1e3, abs=0.06)
    assert 100 < float(found[5]) < 1000  # torch alone takes more than the one, the model less than the rest


def test_nothing_is_on_stderr(outcome: Outcome) -> None:
    assert outcome.err == ""


def test_without_the_flags_there_are_no_timers_norms_or_zeros(tmp_path: Path) -> None:
    outcome = run(f"{MICRO} --train-iters 2 --metrics-file {tmp_path}/deep/er/m.jsonl")
    line = next(line for line in outcome.out.splitlines() if "elapsed time per iteration" in line)
    match = STEP_LINE.match(line)
    assert match and match["throughput"] is match["zeros"] is match["params"] is None
    assert "time per iteration (ms) |" not in outcome.out
    assert set(steps(tmp_path / "deep" / "er" / "m.jsonl")[0]).isdisjoint({"params_norm", "num_zeros"})
    assert outcome.err == ""
