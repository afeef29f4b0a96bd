"""What is not training: text to token files, the sample index, checkpoints."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.checkpoint import Sides
from benchmarks.measure import Row, seconds
from benchmarks.workloads import Workload
from megalite.data.sample_index import build_index

ROOT, CPU_DEVICE = Path(__file__).resolve().parents[1], torch.device("cpu")
QUICKSTART = Path("runs/quickstart")


def timed(run: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of some rounds after one that warms up."""
    return [seconds(run, CPU_DEVICE) for _ in range(rounds + 1)][1:]


def text(name: str, folder: Path, rounds: int) -> Row:
    """The quickstart's training text to token files by two workers, a whole run of the tool."""
    row, corpus = Row(name, "megalite"), folder / "corpus" / "train.jsonl"
    if not corpus.is_file():
        row.note = f"left out: there is no {corpus}: make quickstart"
        return row
    with tempfile.TemporaryDirectory() as target:
        words = [sys.executable, str(ROOT / "tools/preprocess_data.py"), "--input", str(corpus), "--append-eod"]
        words += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(folder / "tokenizer.model")]
        words += ["--workers", "2", "--output-prefix"]
        prefixes = (str(Path(target, f"tokens{number}")) for number in itertools.count())
        row.seconds = timed(lambda: subprocess.run([*words, next(prefixes)], check=True, capture_output=True), rounds)
    row.note = f"{corpus.stat().st_size / 1e6:.1f} MB, start included"
    return row


def indices(name: str, tokens: int, rounds: int) -> Row:
    """The sample index of so many tokens in documents of 500 on average, for sequences of 2,048."""
    row = Row(name, "megalite")
    lengths = np.random.RandomState(0).randint(1, 1000, tokens // 500).astype(np.int32)
    arguments = {"num_samples": None, "seq_length": 2048, "seed": 1}
    row.seconds = timed(lambda: build_index(lengths, 0, len(lengths), **arguments), rounds)
    row.note = f"{int(lengths.sum()):,} tokens in {len(lengths):,} documents"
    return row


def checkpoint(name: str, workload: Workload, rounds: int) -> Iterator[Row]:
    """Save and load of fp32 parameters with Adam's moments, and of the same tensors by torch, synced to the disk, in
    turns. Ours also writes checksums and verifies them."""
    Path("runs").mkdir(exist_ok=True)  # the disk that runs write to
    with tempfile.TemporaryDirectory(dir="runs") as folder:
        ours, file = Sides(workload, Path(folder)), Path(folder, "theirs.pt")

        def save_by_torch() -> None:
            with file.open("wb") as stream:
                torch.save(ours.tensors, stream)
                stream.flush()
                os.fsync(stream.fileno())

        sides: dict[str, Callable[[], object]] = {
            "megalite save": ours.save,
            "torch save": save_by_torch,
            "megalite load": ours.load,
            "torch load": lambda: torch.load(file),
        }
        rows = {side: Row(name, side) for side in sides}
        for turn in range(rounds + 1):
            for side, run in sides.items():
                took = seconds(run, CPU_DEVICE)
                rows[side].seconds += [took] if turn else []
    for what in ("save", "load"):
        mine, theirs = rows[f"megalite {what}"], rows[f"torch {what}"]
        mine.compare(f"x the time of torch's {what}", mine.seconds, theirs.seconds)
    yield from rows.values()
