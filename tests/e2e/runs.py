"""Runs of `pretrain_gpt.py` for the tests: how to start one, and how to read what it left behind.

Key idea: `Program` starts the real thing, with torchrun where there are several processes, and costs seconds, most of
them for importing torch. `Forked` calls the same main function in fresh processes forked from a server that has
imported torch, so hundreds of runs are affordable. `program` and `run` also wait for the end; `run` has a run of one
process in the test's own. Few tests need the real thing.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megalite.config.errors import FlagError
from megalite.distributed import launch
from megalite.distributed.launch import Environment
from megalite.training.prepare import prepare
from tests.helpers import PRELOADED, redirect

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "pretrain_gpt.py"
FAULTY_SCRIPT = ROOT / "tests" / "e2e" / "faults.py"
MARK = "MEGALITE_TEST_RUN"

MOCK = "--mock-data "
MICRO_NETWORK = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--tokenizer-type NullTokenizer --vocab-size 46 --make-vocab-size-divisible-by 1 "
)
MICRO_RUN = (
    f"{MOCK} --eval-iters 0 --log-interval 1 --device cpu --threads-per-rank 1 --lr 1e-3 --lr-decay-style constant "
    "--train-iters 10 --micro-batch-size 2 --global-batch-size 4 --num-workers 0 "
)
MICRO = MICRO_RUN + MICRO_NETWORK
"""As small as a network gets, with dropout 0.1; of 46 ids and EOD, a prime, so that it never divides."""

TOLERANCE = 1e-10
"""Largest relative difference between layouts in float64."""


@dataclass(frozen=True)
class Outcome:
    """`codes`: each process's exit code (torchrun's own, where it started them)."""

    codes: tuple[int, ...]
    out: str
    err: str

    @property
    def code(self) -> int:
        """The exit code of a run of which only one is known, or on which all processes agree."""
        assert len(set(self.codes)) == 1, f"exit codes {self.codes}\n{self}"
        return self.codes[0]

    def __str__(self) -> str:
        return f"exit codes {self.codes}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Started(ABC):
    """Processes of a run. `pids`: those that were started; they start others."""

    pids: list[int]

    @abstractmethod
    def members(self) -> list[int]:
        """Process ids of all that are there: launcher, ranks, data-loader workers."""

    def remaining(self, seconds: float) -> list[int]:
        """Which processes are still there after up to `seconds`."""
        deadline = time.monotonic() + seconds
        while (members := self.members()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return members

    def kill(self) -> None:
        for pid in self.members():
            _kill(pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------- forked processes


@dataclass
class Forked(Started):
    """The program's main function in fresh processes, each the leader of a session. `environment`: for all of
    them. `script`: the program's module."""

    flags: str
    processes: int = 1
    fault: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    script: str = "pretrain_gpt"

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        size = self.processes
        # As torchrun does: the launcher holds the store, on a port that the system chose.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if size > 1 else None
        self._folder = tempfile.TemporaryDirectory()
        argv = [f"{self.script}.py", *shlex.split(self.flags)]
        method = multiprocessing.get_start_method()
        self._workers = []
        for rank in range(size):
            ranks = {} if self._store is None else _worker_environment(rank, size, self._store.port)
            environment = {**ranks, **self.environment}
            arguments = (argv, environment, self.fault, *self._files(rank), method)
            self._workers.append(context.Process(target=_work, args=arguments))
            self._workers[-1].start()
        self.pids = [worker.pid for worker in self._workers if worker.pid is not None]

    def wait(self, timeout: float = 100.0) -> Outcome:
        """What came of it. A run that takes longer than `timeout` is killed and fails the test."""
        deadline = time.monotonic() + timeout
        try:
            for worker in self._workers:
                worker.join(max(0.0, deadline - time.monotonic()))
            late = [worker for worker in self._workers if worker.exitcode is None]
        except BaseException:
            self.kill()
            raise
        if late:
            self.kill()
        files = [self._files(rank) for rank in range(self.processes)]
        out, err = ("".join(path.read_text() for path in paths if path.exists()) for paths in zip(*files, strict=True))
        self._folder.cleanup()
        codes = tuple(-1 if worker.exitcode is None else worker.exitcode for worker in self._workers)
        outcome = Outcome(codes, out, err)
        assert not late, f"{len(late)} of {self.processes} processes did not end within {timeout:g} s\n{outcome}"
        return outcome

    def members(self) -> list[int]:
        return [pid for pid, session, _ in living() if session in self.pids]

    def kill(self) -> None:
        super().kill()
        for worker in self._workers:
            worker.kill()  # one that has no session yet
            worker.join()

    def _files(self, rank: int) -> tuple[Path, Path]:
        """Where a rank's standard output and error go."""
        return Path(self._folder.name, f"{rank}.out"), Path(self._folder.name, f"{rank}.err")


def run(flags: str, processes: int = 1, *, timeout: float = 100.0, check: bool = True, **how: Any) -> Outcome:
    """Run the program in `processes` fresh processes, `Forked`; a single one without `how` but the script runs here.
    With `check` they must all exit with 0."""
    alone = processes == 1 and how.keys() <= {"script"}
    outcome = _run_here(flags, **how) if alone else Forked(flags, processes, **how).wait(timeout)
    if check:
        assert outcome.code == 0, str(outcome)
    return outcome


def _run_here(flags: str, script: str = "pretrain_gpt") -> Outcome:
    """The main function in this process, which goes on: a fork and its end take as long as a short run."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    out, err = io.StringIO(newline=None), io.StringIO(newline=None)  # ends of lines as a file's are read
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(launch, _exit=leave, atexit=mock.Mock(), keep_freed_memory=mock.Mock()))
        stack.enter_context(mock.patch.object(sys, "argv", [f"{script}.py", *shlex.split(flags)]))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        ended = stack.enter_context(pytest.raises(SystemExit))
        importlib.import_module(script).main()
    assert isinstance(ended.value.code, int)
    return Outcome((ended.value.code,), out.getvalue(), err.getvalue())


def _worker_environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _work(
    argv: list[str], environment: dict[str, str], fault: str | None, out: Path, err: Path, start_method: str
) -> None:
    """A forked process's life."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    redirect(out, err)
    multiprocessing.set_start_method(start_method, force=True)  # what the program finds when started by hand
    os.environ.update(environment)
    sys.argv = argv
    # Or else torch takes back each of its own operators at the end of a process, for a tenth of the time of a run.
    atexit.unregister(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    from tests.e2e import faults

    faults.main(fault, Path(argv[0]).stem)


def refusal(flags: str, processes: int = 1, *, sections: list[str] | None = None) -> str:
    """What the flags of a run are refused with before any process group exists; in this process."""
    environment = Environment(0, processes, 0, processes)
    with pytest.raises(FlagError) as raised:
        prepare(shlex.split(flags), environment, program="pretrain_gpt.py", description="", sections=sections)
    return str(raised.value)


# --------------------------------------------------------------------------------------------------- real processes


@dataclass
class Program(Started):
    """The program started by hand or by torchrun. All its processes carry a mark in their environment. `elastic`: more
    flags of torchrun."""

    flags: str
    processes: int = 1
    fault: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    torchrun: bool | None = None
    script: Path = SCRIPT
    elastic: str = ""

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        torchrun = self.processes > 1 if self.torchrun is None else self.torchrun
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(self.processes)] if torchrun else []
        launcher += shlex.split(self.elastic)
        script = [str(self.script)] if self.fault is None else [str(FAULTY_SCRIPT), self.fault]
        self._files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by wait)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
        self._process = subprocess.Popen(
            [sys.executable, *launcher, *script, *shlex.split(self.flags)],
            stdout=self._files[0],
            stderr=self._files[1],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: self.mark} | self.environment,
        )
        self.pids = [self._process.pid]

    def wait(self, timeout: float = 100.0) -> Outcome:
        """What came of it. A run that takes longer than `timeout` is killed and fails the test."""
        late = False
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
            self.kill()
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read())
            file.close()
        outcome = Outcome((self._process.returncode,), *texts)
        assert not late, f"not ended within {timeout:g} s\n{outcome}"
        return outcome

    def members(self) -> list[int]:
        return [
            pid
            for pid, _, folder in living()
            if f"{MARK}={self.mark}".encode() in _read(folder / "environ").split(b"\0")
        ]

    def kill(self) -> None:
        super().kill()
        self._process.wait()


def program(flags: str, processes: int = 1, *, timeout: float = 100.0, check: bool = True, **how: Any) -> Outcome:
    """Start the real program and wait for its end. With `check` it must exit with 0."""
    outcome = Program(flags, processes, **how).wait(timeout)
    if check:
        assert outcome.code == 0, str(outcome)
    return outcome


NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc: Linux has it")


def living() -> Iterator[tuple[int, int, Path]]:
    """Process id, session and folder in /proc of each process but zombies."""
    for folder in Path("/proc").glob("[0-9]*"):
        words = _read(folder / "stat").rpartition(b")")[2].split()  # state, parent, group, session, ...
        if words and words[0] != b"Z":
            yield int(folder.name), int(words[3]), folder


def _read(path: Path) -> bytes:
    """The bytes of a file of /proc; none where the process has ended meanwhile, or is someone else's."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    """Return once `condition()` is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain"
        time.sleep(0.02)


# --------------------------------------------------------------------------------------------------- what a run left


def records(path: Path, *, exact: bool = False) -> list[dict[str, Any]]:
    """The lines of a metrics file. `exact`: numbers as they are written."""
    number = str if exact else None
    return [json.loads(line, parse_float=number, parse_int=number) for line in path.read_text().splitlines()]


def steps(path: Path, *, exact: bool = False) -> list[dict[str, Any]]:
    """The lines of training steps."""
    return [record for record in records(path, exact=exact) if "split" not in record]


def evaluations(path: Path, *, exact: bool = False) -> list[dict[str, Any]]:
    """The lines of evaluations."""
    return [record for record in records(path, exact=exact) if "split" in record]


def written(path: Path, *names: str) -> list[tuple[str, ...]]:
    """Iteration and the fields `names` (default: loss and gradient norm) of each step, as written."""
    chosen = ("iteration", *(names or ("lm_loss", "grad_norm")))
    return [tuple(step[name] for name in chosen) for step in steps(path, exact=True)]


def largest_difference(a: Path, b: Path) -> float:
    """Largest relative difference of loss and gradient norm between two metrics files of the same steps."""
    first, second = steps(a), steps(b)
    assert [step["iteration"] for step in first] == [step["iteration"] for step in second]
    assert first
    pairs = [(x[name], y[name]) for x, y in zip(first, second, strict=True) for name in ("lm_loss", "grad_norm")]
    return max(abs(x - y) / abs(y) for x, y in pairs)


def gradients(folder: Path) -> dict[str, Tensor]:
    """What `--dump-grads` wrote."""
    return load_file(folder / "grads.safetensors")


def gradient_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest over the parameters of max|a - b| / max(max|b|, 1e-6 x global norm of b), so that a gradient which is
    zero in exact arithmetic (a key bias) isn't judged by its noise."""
    assert a.keys() == b.keys()
    norm = torch.stack([tensor.double().square().sum() for tensor in b.values()]).sum().sqrt().item()
    worst = 0.0
    for name, tensor in b.items():
        assert a[name].shape == tensor.shape
        scale = max(tensor.abs().max().item(), 1e-6 * norm)
        worst = max(worst, (a[name] - tensor).abs().max().item() / scale)
    return worst


def outputs(folder: Path) -> str:
    """Flags with which a run leaves in `folder` what `assert_equal` compares."""
    return f"--metrics-file {folder}/metrics.jsonl --dump-grads {folder} "


def assert_equal(folder: Path, reference: Path, tolerance: float = TOLERANCE) -> None:
    """Every step's loss and gradient norm, and all gradients of the first step, of two runs of several steps."""
    assert len(steps(folder / "metrics.jsonl")) > 2
    assert largest_difference(folder / "metrics.jsonl", reference / "metrics.jsonl") <= tolerance
    assert gradient_difference(gradients(folder), gradients(reference)) <= tolerance


def checkpoint_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of one checkpoint, read by the safetensors library and put together by the names in its files."""
    shapes = {key: entry["shape"] for key, entry in json.loads((folder / "index.json").read_text())["tensors"].items()}
    result: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, part in load_file(file).items():
            key, _, ranges = name.partition("[")
            bounds = [tuple(map(int, pair.split(":"))) for pair in ranges.rstrip("]").split(",") if pair]
            whole = result.setdefault(key, torch.zeros(shapes[key], dtype=part.dtype))
            whole[tuple(slice(*pair) for pair in bounds)].copy_(part)
    assert result.keys() == shapes.keys()
    return result


def training_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds beside its tensors."""
    return json.loads((folder / "training_state.json").read_text())


def assert_same_checkpoint(a: Path, b: Path) -> None:
    """Equal tensors bit by bit, and an equal state."""
    first, second = checkpoint_tensors(a), checkpoint_tensors(b)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"{len(different)} of {len(first)} tensors differ, e.g. {different[:5]}"
    assert training_state(a) == training_state(b)


def newest(root: Path) -> int:
    """The iteration that the tracker names."""
    return int((root / "latest_checkpointed_iteration.txt").read_text())


def checkpoint(root: Path, iteration: int) -> Path:
    """The folder of one checkpoint."""
    return root / f"iter_{iteration:07d}"
