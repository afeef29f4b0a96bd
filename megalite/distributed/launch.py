"""From a started process to a mesh, and from an exception to an exit code.

Key idea: a run fails as a whole. Flags are checked before any process group exists. Later, the rank that failed first
prints the reason and exits without a clean-up that could hang; the others see its connection close and exit silently.

Exit codes of a worker: 0 done, 2 bad flags, 1 anything else.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

# Torch's C++ warns of each lost connection with a trace of its own. It reads this when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist

from megalite.config.errors import FlagError, UserError
from megalite.config.schema import LayoutConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.peers import Connections, Watch, meet, open_store, store_of_meeting
from megalite.distributed.slurm import as_torchrun

RENDEZVOUS_SECONDS = 45
_OTHERS_WAIT = 15.0  # so that the speaking rank's message is out before the launcher ends the rest
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # mallopt(3)
_GRACE = 1.0  # a rank that fails for its own reasons lets rank 0 speak first, where both fail alike
_PR_SET_PDEATHSIG = 1  # prctl(2)
_OWN_GPU = "If each process sees only its own GPU: export LOCAL_RANK=0"
_PEER_FAILURE = re.compile(r"gloo/transport|Connection (closed|reset) by peer|remote process exited", re.IGNORECASE)


@dataclass(frozen=True)
class Environment:
    """What torchrun, srun or a cluster told this process of its place: `launch_variables`."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    local_rank_is_known: bool = True

    @property
    def speaks_for_machine(self) -> bool:
        """Whether this process tells what all of its machine's processes find alike."""
        return (self.local_rank if self.local_rank_is_known else self.rank) == 0

    @property
    def under_torchrun(self) -> bool:
        return "TORCHELASTIC_RUN_ID" in os.environ


def launch_variables() -> Mapping[str, str]:
    """The environment; where it has neither RANK nor WORLD_SIZE, with what srun says in their place.

    What is set wins over srun's. With a LOCAL_RANK that is set, LOCAL_WORLD_SIZE isn't srun's either.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return os.environ
    variables = as_torchrun(os.environ)
    if "LOCAL_RANK" in os.environ:
        variables.pop("LOCAL_WORLD_SIZE", None)
    return {**variables, **os.environ}


def read_environment() -> Environment:
    """The environment, or one process where it says nothing. Numbers that don't fit raise a FlagError."""
    variables = launch_variables()
    if "WORLD_SIZE" not in variables and "RANK" not in variables:
        return Environment()
    values = {}
    for name, default in (("RANK", None), ("WORLD_SIZE", None), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        text = variables.get(name, default)
        if text is None or not text.isdigit():
            raise FlagError(f"environment variable {name} is {text!r}: torchrun sets it to a number")
        values[name.lower()] = int(text)
    environment = Environment(**values, local_rank_is_known="LOCAL_RANK" in variables)
    if environment.rank >= environment.world_size:
        raise FlagError(f"RANK={environment.rank} must be below WORLD_SIZE={environment.world_size}")
    return environment


def choose_device(name: str, environment: Environment) -> torch.device:
    """`auto`, `cpu` or `cuda` → this rank's device. A FlagError, alike on all ranks, where there are too few."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if environment.local_world_size > available:
        bound = "" if environment.under_torchrun or available != 1 else f". {_OWN_GPU}"
        raise FlagError(
            f"--device {name}: {environment.local_world_size} processes on this machine need a GPU each, and there are "
            f"{available}: start fewer, or use --device cpu{bound}"
        )
    if environment.world_size > 1 and not environment.local_rank_is_known:
        raise FlagError(
            f"--device {name}: LOCAL_RANK isn't set, so each of the {environment.world_size} processes would take GPU "
            "0. Start with torchrun, or set it in each process; under Slurm: export LOCAL_RANK=$SLURM_LOCALID. "
            f"{_OWN_GPU}"
        )
    if environment.local_rank >= available:
        raise FlagError(
            f"--device {name}: LOCAL_RANK={environment.local_rank} must be below {available}, the number of GPUs "
            f"that this process sees. {_OWN_GPU}"
        )
    return torch.device("cuda", environment.local_rank)


def set_threads(threads: int | None, local_world_size: int) -> int:
    """Set and return torch's threads: `threads`, or the cores shared out over this machine's processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = threads or max(1, cores // local_world_size)
    torch.set_num_threads(count)
    return count


def keep_freed_memory() -> None:
    """Have glibc's allocator keep large blocks that were freed, for the tensors of the next step.

    By default each large tensor is memory fresh from the kernel, cleared page by page: a third of a small step on a
    CPU. The price is that a process stays as large as it has once been. MALLOC_* variables of the user's win.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc alone has it
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 1 << 29)):
            mallopt(option, value)


def end_with_launcher() -> None:
    """Have the kernel (Linux's) end this process when the one that started it is gone, however it ended. A torchrun
    that is killed would leave its workers behind, at the same files as those that the other machines' go on with."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _meet(environment: Environment, deadline: float) -> tuple[dist.Store, Connections]:
    """A store that all ranks reach, and connections between them, once all are here."""
    rank, world = environment.rank, environment.world_size
    variables = launch_variables()
    address, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
    if not address or not port or not port.isdigit():
        raise UserError(f"WORLD_SIZE={world} needs MASTER_ADDR and MASTER_PORT: start with torchrun")
    place = f"MASTER_ADDR={address} MASTER_PORT={port}"
    try:
        store = open_store(address, int(port), rank, deadline)
        connections = meet(store, rank, world, (address, int(port)), deadline)
        return store_of_meeting(store), connections
    except (UserError, OSError, RuntimeError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise UserError(
                f"{place}: the port is taken; set another MASTER_PORT, or use torchrun --standalone"
            ) from None
        raise UserError(
            f"expected WORLD_SIZE={world} processes at {place} within {RENDEZVOUS_SECONDS} s ({text}); {_advice()}"
        ) from None


def _advice() -> str:
    """What helps where ranks don't meet. Torch 2.13's torchrun, when machines have come or gone, may tell its workers
    the place of an earlier round: each agent keeps what it was told first, unless that variable is set."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return (
            "if machines came or went (--nnodes MIN:MAX), start each torchrun with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"
        )
    return "start as many processes as WORLD_SIZE says, or use torchrun (under Slurm: srun)"


@contextlib.contextmanager
def start(config: LayoutConfig, environment: Environment, device: torch.device) -> Iterator[tuple[Mesh, Watch | None]]:
    """Process groups for the layout, and the watch over the other ranks where there are any, while the block runs. Torn
    down when it ends well; after an error the process is about to exit, and a clean-up that waits for dead peers would
    only hang."""
    layout = Layout.from_config(config, environment.world_size)
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if environment.world_size == 1:
        yield Mesh.create(layout, device, backend=backend, timeout=timeout), None
        return
    if environment.under_torchrun:
        end_with_launcher()
    store, connections = _meet(environment, time.monotonic() + RENDEZVOUS_SECONDS)
    watch = Watch(connections, partial(_stop_for, environment))
    store.set_timeout(timeout)
    rank, world = environment.rank, environment.world_size
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    yield Mesh.create(layout, device, backend=backend, timeout=timeout), watch
    dist.barrier()
    watch.close()
    dist.destroy_process_group()


def _stop_for(environment: Environment, lost: int) -> None:
    """End this process, since rank `lost` is gone. What both notice, the main thread tells better, and sooner."""
    time.sleep(_OTHERS_WAIT if environment.under_torchrun else 2 * _GRACE)
    _say(f"rank {environment.rank}: stopped, because another rank failed (rank {lost} ended)")
    _exit(1)


def _exit(code: int) -> None:
    """Leave at once: no interpreter clean-up, which could wait for a dead peer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say(message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def tell_failure(failure: str) -> None:
    """Tell why this process fails. Under torchrun in the record that it shows last, at the end of its own report. It
    shows that of the last attempt alone, so before that, or where the record can't be written, on stderr."""
    record = os.environ.get("TORCHELASTIC_ERROR_FILE")
    told = {"message": failure, "extraInfo": {"py_callstack": failure, "timestamp": str(int(time.time()))}}
    try:
        if record is not None:
            Path(record).write_text(json.dumps({"message": told}), encoding="utf-8")
            if os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get("TORCHELASTIC_MAX_RESTARTS"):
                return
    except OSError:
        pass
    _say(failure)


def _fail(error: BaseException, environment: Environment) -> None:
    """Tell of a failure once and exit 1.

    An error that may only say that another rank is gone waits for that rank to tell: under torchrun this process is
    ended meanwhile. Where nobody does, it is the failure.
    """
    shared_launch = environment.world_size > 1
    if shared_launch and not isinstance(error, UserError) and _is_peer_failure(error):
        time.sleep(_OTHERS_WAIT if environment.under_torchrun else _GRACE)
        if not environment.under_torchrun:
            first = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            _say(f"rank {environment.rank}: stopped, because another rank failed ({first})")
            _exit(1)
    elif shared_launch and environment.rank != 0:
        time.sleep(_GRACE)
    if not isinstance(error, UserError):
        tell_failure("".join(traceback.format_exception(error)).rstrip())
    elif not error.everywhere or environment.rank == 0:
        tell_failure(f"error: {error}")
    _exit(1)


def _is_peer_failure(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(_PEER_FAILURE.search(str(error)))


def run_worker(main: Callable[[Environment], None]) -> None:
    """Run `main` as this process's whole work and exit with the code that the outcome deserves; it never returns."""
    environment = Environment()
    try:
        environment = read_environment()
        main(environment)
    except FlagError as error:
        if environment.speaks_for_machine:
            tell_failure(f"error: {error}")
        elif environment.under_torchrun:
            time.sleep(_OTHERS_WAIT)
        _exit(2)
    except KeyboardInterrupt:
        if environment.rank == 0:
            _say("interrupted")
        _exit(130)
    except SystemExit:
        raise
    except BaseException as error:
        _fail(error, environment)
    # Without the interpreter's teardown: a communication thread that lets go of a tensor then asks for the interpreter,
    # and is ended by it in the midst of C++, which aborts the process.
    atexit._run_exitfuncs()
    _exit(0)
