"""What a run reports: log lines in Megatron-LM's form, the metrics file, TensorBoard, Weights & Biases.

Key idea: the loop hands over one `StepRecord` a step; each sink takes from it what it needs. Only the first rank has
sinks, since every rank holds the same numbers.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from megalite.config.fields import all_fields, get, output_folders
from megalite.config.schema import RunConfig
from megalite.files.atomic import replacing
from megalite.files.remote import Place, Remote, place


@dataclass(frozen=True)
class StepRecord:
    """One training step. `counted_tokens` those whose loss counts; `lm_loss` nats per such token, NaN where there are
    none; `learning_rate` the one that this step used; `mtp_losses` as `lm_loss`, of each depth of multi-token
    prediction. What is None wasn't asked for."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    counted_tokens: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float
    skipped: bool
    global_batch_size: int
    elapsed_ms: float
    tokens_per_second: float
    tflops_per_device: float
    params_norm: float | None = None
    num_zeros: int | None = None
    largest_grad_norms: Mapping[str, float] | None = None
    fp8: Mapping[str, float] | None = None
    moe: Mapping[str, float] | None = None
    mtp_losses: Sequence[float] | None = None


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation of a split after `iteration` steps. `scores`: what else was measured, by name. `of_tokens`: the
    loss is of next tokens, not of classes."""

    iteration: int
    split: str
    lm_loss: float
    scores: Mapping[str, float] = field(default_factory=dict)
    of_tokens: bool = True

    @property
    def perplexity(self) -> float | None:
        """At most e^20, so that it is finite; NaN of NaN. None where the loss is of classes, which have none."""
        if not self.of_tokens:
            return None
        return self.lm_loss if math.isnan(self.lm_loss) else math.exp(min(20.0, self.lm_loss))


class Sink:
    """Takes records."""

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, record: EvaluationRecord) -> None: ...

    def flush(self) -> None:
        """Have all records where they are kept: a checkpoint follows, from which a killed run goes on."""

    def close(self) -> None: ...


class LogLines(Sink):
    """Lines on stdout: after the first iteration of this process and at multiples of `--log-interval`.

    Loss and time are means since the last line.
    """

    def __init__(self, config: RunConfig, total_iterations: int):
        self.config, self.total = config, total_iterations
        self.records: list[StepRecord] = []
        self.first = True

    def step(self, record: StepRecord) -> None:
        if record.counted_tokens == 0:
            print(
                f"iteration {record.iteration}: no token of this batch counts for the loss, so nothing is "
                "learned from it",
                flush=True,
            )
        self.records.append(record)
        if self.first or record.iteration % self.config.logging.log_interval == 0:
            print(f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] " + " | ".join(self._parts()) + " |", flush=True)
            if record.moe and self.config.model.moe_per_layer_logging:
                for layer, values in _by_layer(record.moe).items():
                    print(f" layer {layer}: " + " | ".join(_load_words(values)), flush=True)
            if record.largest_grad_norms:
                norms = " | ".join(f"{name}: {norm:.4f}" for name, norm in record.largest_grad_norms.items())
                print(f" largest gradient norms | {norms} |", flush=True)
            self.first, self.records = False, []

    def _parts(self) -> Iterator[str]:
        last, count = self.records[-1], len(self.records)
        losses = [r.lm_loss for r in self.records if math.isfinite(r.lm_loss) and not r.skipped]
        yield f"iteration {last.iteration:8d}/{self.total:8d}"
        yield f"consumed samples: {last.consumed_samples:12d}"
        yield f"elapsed time per iteration (ms): {sum(r.elapsed_ms for r in self.records) / count:.1f}"
        if self.config.logging.log_throughput:
            mean = sum(r.tflops_per_device for r in self.records) / count
            yield f"throughput per GPU (TFLOP/s/GPU): {mean:.{1 if mean >= 1 else 4}f}"
        yield f"learning rate: {last.learning_rate:.6E}"
        yield f"global batch size: {last.global_batch_size:5d}"
        if losses:
            yield f"lm loss: {sum(losses) / len(losses):.6E}"
        ahead = [r.mtp_losses for r in self.records if r.mtp_losses is not None and not r.skipped]
        for depth, values in enumerate(zip(*ahead, strict=True), start=1):
            yield f"mtp_{depth} loss: {sum(values) / len(values):.6E}"
        yield f"loss scale: {last.loss_scale}"
        yield f"grad norm: {last.grad_norm:.3f}"
        if last.moe:
            yield from _load_words(_mean_load(last.moe))
        if last.num_zeros is not None:
            yield f"num zeros: {last.num_zeros}"
        if last.params_norm is not None:
            yield f"params norm: {last.params_norm:.3f}"
        yield f"number of skipped iterations: {sum(r.skipped for r in self.records):3d}"
        nans = sum(r.counted_tokens > 0 and math.isnan(r.lm_loss) for r in self.records)
        yield f"number of nan iterations: {nans:3d}"

    def evaluation(self, record: EvaluationRecord) -> None:
        name = {"valid": "validation", "test": "test"}.get(record.split, record.split)
        values = [f"lm loss value: {record.lm_loss:.6E}"]
        if record.perplexity is not None:
            values.append(f"lm loss PPL: {record.perplexity:.6E}")
        values += [f"{score.replace('_', ' ')}: {value:.4f}" for score, value in record.scores.items()]
        line = f" {name} loss at iteration {record.iteration} | {' | '.join(values)} | "
        print("-" * len(line), line, "-" * len(line), sep="\n", flush=True)


def _by_layer(load: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """`layer/name` by layer, then by name."""
    layers: dict[str, dict[str, float]] = {}
    for key, value in load.items():
        layer, name = key.split("/")
        layers.setdefault(layer, {})[name] = value
    return layers


def _mean_load(load: Mapping[str, float]) -> dict[str, float]:
    """Means over the layers, by name."""
    layers = list(_by_layer(load).values())
    return {name: sum(values[name] for values in layers) / len(layers) for name in layers[0]}


def _load_words(values: Mapping[str, float]) -> Iterator[str]:
    if values["balance_loss"]:  # 0 is that of none
        yield f"load balancing loss: {values['balance_loss']:.6E}"
    if values["z_loss"]:
        yield f"z loss: {values['z_loss']:.6E}"
    yield f"tokens per expert, max over mean: {values['max_over_mean']:.2f}"
    if values["dropped"]:
        yield f"dropped: {values['dropped']:.2%}"


def _for_json(value: Any) -> Any:
    """JSON has no NaN or infinity: null stands for them."""
    if isinstance(value, Mapping):
        return {name: _for_json(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read(path: Place) -> list[tuple[str, dict[str, Any] | None]]:
    """The lines of a metrics file with their values: None of one that has no iteration, or was cut off by a kill."""
    lines: list[tuple[str, dict[str, Any] | None]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
            values["iteration"] = int(values["iteration"])
        except (ValueError, KeyError, TypeError):
            values = None
        lines.append((line, values))
    return lines


def evaluated_splits(path: Place, iteration: int) -> set[str]:
    """The splits whose evaluation after `iteration` steps a metrics file holds."""
    found = (values for _, values in _read(path) if values is not None and values["iteration"] == iteration)
    return {values["split"] for values in found if "split" in values}


class MetricsFile(Sink):
    """One JSON object a line, floats at full precision, flushed every line.

    Lines beyond `resume_iteration` are those of a run that was lost; they are removed first. A run from the start sets
    an older file aside as `FILE.old`. Nothing can be appended to an object in storage: it's written anew, from a copy
    on this machine, before each checkpoint, after each evaluation and at the end.
    """

    def __init__(self, path: Place, resume_iteration: int):
        self._remote = path if isinstance(path, Remote) else None
        if isinstance(path, Remote):
            self._folder = tempfile.TemporaryDirectory(prefix="megalite-")
            path = _local_copy(path, Path(self._folder.name), aside=resume_iteration == 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and resume_iteration == 0 and path.stat().st_size:
            os.replace(path, path.with_name(path.name + ".old"))
        elif path.exists():
            lines = _read(path)
            kept = [line + "\n" for line, values in lines if values and values["iteration"] <= resume_iteration]
            with replacing(path) as file:
                file.write("".join(kept).encode())
        self._path, self.file = path, path.open("a", encoding="utf-8")

    def _write(self, values: Mapping[str, Any]) -> None:
        given = {name: value for name, value in values.items() if value is not None}
        self.file.write(json.dumps(_for_json(given)) + "\n")
        self.file.flush()

    def flush(self) -> None:
        if self._remote is not None:
            self._remote.write_bytes(self._path.read_bytes())

    def step(self, record: StepRecord) -> None:
        values = asdict(record)
        del values["counted_tokens"]
        self._write(values)

    def evaluation(self, record: EvaluationRecord) -> None:
        position = {"iteration": record.iteration, "split": record.split}
        self._write(position | {"lm_loss": record.lm_loss, "ppl": record.perplexity} | dict(record.scores))
        self.flush()

    def close(self) -> None:
        self.file.close()
        self.flush()
        if self._remote is not None:
            self._folder.cleanup()


def _local_copy(file: Remote, folder: Path, *, aside: bool) -> Path:
    """A copy of an object in a folder, where there is one. `aside`: under another name in storage instead."""
    target = folder / file.name
    if file.exists():
        content = file.read_bytes()
        if aside and content:
            (file.parent / f"{file.name}.old").write_bytes(content)
        else:
            target.write_bytes(content)
    return target


# Megatron-LM's tags of the fields of a StepRecord.
_TAGS = {
    "lm_loss": "lm loss",
    "learning_rate": "learning-rate",
    "grad_norm": "grad-norm",
    "global_batch_size": "batch-size",
    "loss_scale": "loss-scale",
    "tflops_per_device": "throughput",
    "params_norm": "params-norm",
    "num_zeros": "num-zeros",
}


def _step_scalars(record: StepRecord) -> dict[str, float]:
    values = {tag: getattr(record, name) for name, tag in _TAGS.items()} | {"iteration-time": record.elapsed_ms / 1e3}
    values |= {f"mtp_{depth} loss": loss for depth, loss in enumerate(record.mtp_losses or (), start=1)}
    return {tag: value for tag, value in values.items() if value is not None}


class TensorBoard(Sink):
    """Scalars for TensorBoard, every `--tensorboard-log-interval` steps."""

    def __init__(self, directory: str, config: RunConfig, resume_iteration: int):
        from torch.utils.tensorboard import SummaryWriter

        self.interval = config.logging.tensorboard_log_interval
        self.memory = config.logging.log_memory_to_tensorboard
        self.writer = SummaryWriter(directory, purge_step=resume_iteration + 1 if resume_iteration else None)

    def step(self, record: StepRecord) -> None:
        if record.iteration % self.interval != 0:
            return
        values = _step_scalars(record)
        if self.memory:
            values["mem-allocated-bytes"] = allocated_bytes()
        values |= {f"fp8/{name}": value for name, value in (record.fp8 or {}).items()}
        values |= {f"moe/{name}": value for name, value in (record.moe or {}).items()}
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, record.iteration)

    def evaluation(self, record: EvaluationRecord) -> None:
        name = "validation" if record.split == "valid" else record.split
        values = {f"lm loss {name}": record.lm_loss, f"lm loss {name} ppl": record.perplexity}
        values |= {f"{score} {name}": value for score, value in record.scores.items()}
        for tag, value in values.items():
            if value is not None:
                self.writer.add_scalar(tag, value, record.iteration)

    def close(self) -> None:
        self.writer.close()


def allocated_bytes() -> int:
    """Bytes that torch holds on the GPU, or this process's resident memory where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes, the peak


class WeightsAndBiases(Sink):
    """The same scalars for Weights & Biases."""

    def __init__(self, config: RunConfig):
        import wandb

        self.run = wandb.init(
            project=config.logging.wandb_project, name=config.logging.wandb_exp_name, config=config.to_dict()
        )

    def step(self, record: StepRecord) -> None:
        self.run.log(_step_scalars(record), step=record.iteration)

    def evaluation(self, record: EvaluationRecord) -> None:
        values = {"lm loss": record.lm_loss, **record.scores}
        self.run.log({f"{name} {record.split}": value for name, value in values.items()}, step=record.iteration)

    def close(self) -> None:
        self.run.finish()


def check_sinks(config: RunConfig) -> list[str]:
    """Problems with what the flags that name outputs need."""
    logging, problems = config.logging, []
    if logging.wandb_project is not None:
        problems += _missing(f"--wandb-project {logging.wandb_project}", "wandb", "wandb")
    if logging.tensorboard_dir is not None:
        problems += _missing(f"--tensorboard-dir {logging.tensorboard_dir}", "torch.utils.tensorboard", "tensorboard")
    folders = {flag: place(folder) for flag, folder in output_folders(config).items()}
    for each in all_fields().values():
        if each.writes in ("folder", "file") and (given := get(config, each.path)) is not None:
            folders[each.option] = place(given) if each.writes == "folder" else place(given).parent
    for flag, folder in folders.items():
        if reason := _unwritable(folder):
            problems.append(f"{flag}: {reason}")
    if logging.metrics_file is not None and (reason := _not_metrics(place(logging.metrics_file))):
        problems.append(f"--metrics-file {logging.metrics_file} {reason}")
    return problems


def _missing(flag: str, module: str, package: str) -> list[str]:
    """A problem where what a flag needs can't be imported: it may be there and not fit the rest."""
    try:
        importlib.import_module(module)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return [f"{flag} needs the package {package}, which can't be imported ({reason}): pip install {package}"]
    return []


def _not_metrics(path: Place) -> str | None:
    """Why what is at `path` must not become a metrics file, or None. A last line that was cut off is no reason."""
    if path.is_dir():
        return "is a folder: name a file"
    try:
        values = [values for _, values in _read(path)]
    except (OSError, UnicodeDecodeError):
        return "can't be read as text: name another file"
    if None in values[:-1] or values == [None]:
        return "exists and is not a metrics file: give another file"
    return None


def _unwritable(folder: Place) -> str | None:
    """Why a folder can't be made or written to, or None. Makes it. What can't be read isn't written either, and the
    rest a store tells the run that claims the place."""
    if isinstance(folder, Remote):
        try:
            folder.is_dir()
        except OSError as error:
            return f"{folder} can't be reached: {error.strerror}"
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{folder} can't be made: {error.strerror}"
    return None if os.access(folder, os.W_OK) else f"{folder} is not writable"


def make_sinks(config: RunConfig, total_iterations: int, resume_iteration: int) -> list[Sink]:
    """The sinks that the configuration asks for; call on the first rank alone."""
    logging = config.logging
    sinks: list[Sink] = [LogLines(config, total_iterations)]
    if logging.metrics_file is not None:
        sinks.append(MetricsFile(place(logging.metrics_file), resume_iteration))
    if logging.tensorboard_dir is not None:
        sinks.append(TensorBoard(logging.tensorboard_dir, config, resume_iteration))
    if logging.wandb_project is not None:
        sinks.append(WeightsAndBiases(config))
    return sinks
