"""Time, peak and table: what all benchmarks of training speed share.

Key idea: absolute numbers differ between machines, so a row holds every round's rate beside the machine's own peak from
the same run, and what failed is a row that says why.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from megalite.files.atomic import replacing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """How long `run` takes; on a GPU by events on its stream, so that nothing waits for the device before the end."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def gemm_peak(dtype: str, device: torch.device, size: int | None = None) -> float:
    """FLOP/s of a square matrix product, the median of some; by default of 2048 on a CPU, 8192 on a GPU."""
    on_gpu = device.type == "cuda"
    size = size or (8192 if on_gpu else 2048)
    a, b = (torch.randn(size, size, device=device).to(DTYPES[dtype]) for _ in range(2))
    one = torch.ones((), device=device)
    result = torch.empty(size, size, dtype=DTYPES["bf16" if dtype == "fp8" else dtype], device=device)

    def product() -> object:
        if dtype == "fp8":  # it takes the second operand by columns
            kind = ScalingType.TensorWise
            return F.scaled_mm(a, b.t(), one, kind, one, kind, output_dtype=torch.bfloat16)
        return torch.mm(a, b, out=result)

    count = 10 if on_gpu else 1

    def products() -> None:
        for _ in range(count):
            product()

    times = [seconds(products, device) / count for _ in range(6)]
    return 2 * size**3 / statistics.median(times[1:])


VENDOR = (
    *(("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H100", 989e12), ("H200", 989e12)),
    *(("B200", 2250e12), ("A100", 312e12), ("L40S", 362e12)),
)
"""Dense bf16 FLOP/s by NVIDIA's data sheets, by a part of the device's name; the first that fits. FP8's are twice."""


def vendor_peak(dtype: str, device: torch.device) -> float | None:
    """The vendor's FLOP/s, where the device is known."""
    if device.type != "cuda" or dtype == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    found = next((peak for part, peak in VENDOR if part in name), None)
    can_fp8 = "A100" not in name
    return None if found is None or (dtype == "fp8" and not can_fp8) else found * (2 if dtype == "fp8" else 1)


@dataclass
class Row:
    """`rates`: tokens/s of each round, or `seconds`. `flops`: of the model for a token. `peak`: FLOP/s of a GEMM of the
    same dtype in the same run, `vendor`: the vendor's. `memory`: the most bytes held. `ratios`: of each round, of what
    `ratio_of` says. `loss_apart`, `gradient_apart`: relative differences from what the row is compared with. `first`:
    loss and gradient norm of the first step."""

    workload: str
    side: str
    rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    flops: float = 0.0
    peak: float | None = None
    vendor: float | None = None
    memory: int | None = None
    ratio_of: str = ""
    ratios: list[float] = field(default_factory=list)
    loss_apart: float | None = None
    gradient_apart: float | None = None
    first: tuple[float, float] | None = None
    note: str = ""

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def compare(self, what: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
        """Take ours / theirs of each round."""
        self.ratio_of, self.ratios = what, [a / b for a, b in zip(ours, theirs, strict=True)]

    def values(self) -> dict[str, Any]:
        """For JSON."""
        values = dataclasses.asdict(self)
        if self.rates:
            values |= {"tokens_per_second": self.rate, "flops_per_second": self.rate * self.flops}
            values |= {
                name: self.rate * self.flops / peak if peak else None
                for name, peak in (("mfu", self.peak), ("mfu_of_vendor", self.vendor))
            }
        if self.ratios:
            values["ratio"] = statistics.median(self.ratios)
        return values


def _spread(numbers: Sequence[float], form: str) -> str:
    if not numbers:
        return ""
    middle, low, high = (format(each, form) for each in (statistics.median(numbers), min(numbers), max(numbers)))
    return middle if len(numbers) == 1 else f"{middle} ({low} to {high})"


def _cells(row: Row) -> dict[str, str]:
    def share(peak: float | None) -> str:
        return f"{row.rate * row.flops / peak:.1%}" if row.rates and peak and row.flops else ""

    return {
        "workload": row.workload,
        "side": row.side,
        "tokens/s": _spread(row.rates, ".0f"),
        "seconds": _spread(row.seconds, ".3g"),
        "TFLOP/s": f"{row.rate * row.flops / 1e12:.3g}" if row.rates and row.flops else "",
        "GEMM peak": f"{row.peak / 1e12:.3g}" if row.rates and row.peak else "",
        "MFU": share(row.peak),
        "MFU of vendor's": share(row.vendor),
        "memory, GB": "" if row.memory is None else f"{row.memory / 1e9:.2f}",
        "ratio": f"{_spread(row.ratios, '.3f')} {row.ratio_of}" if row.ratios else "",
        "loss apart": "" if row.loss_apart is None else f"{row.loss_apart:.1e}",
        "gradients apart": "" if row.gradient_apart is None else f"{row.gradient_apart:.1e}",
        "note": row.note,
    }


def table(rows: Sequence[Row]) -> str:
    """Markdown, without columns that are empty in all rows."""
    cells = [_cells(row) for row in rows]
    names = [name for name in (cells[0] if cells else {}) if any(each[name] for each in cells)]
    widths = {name: max(len(name), *(len(each[name]) for each in cells)) for name in names}

    def line(values: Sequence[str]) -> str:
        return "| " + " | ".join(f"{value:{widths[name]}}" for name, value in zip(names, values, strict=True)) + " |"

    head = [line(names), "|" + "|".join("-" * (widths[name] + 2) for name in names) + "|"]
    return "\n".join([*head, *(line([each[name] for name in names]) for each in cells)])


def write_json(path: Path | None, rows: Sequence[Row], **about: Any) -> None:
    """What was measured, and of what; nothing without a path."""
    if path is None:
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    about |= {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads()}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"about": about, "rows": [row.values() for row in rows]}, indent=1)
    with replacing(path) as stream:
        stream.write(f"{text}\n".encode())


Numbers = tuple[float, float] | None
"""Loss and gradient norm."""


def apart(ours: Numbers, theirs: Numbers) -> tuple[float, float]:
    """Relative differences."""
    assert ours is not None and theirs is not None
    loss, norm = (abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    return loss, norm


def reason(error: BaseException) -> str:
    """One line that says why a measurement failed."""
    lines = str(error).strip().splitlines()
    said = lines[-1 if "Traceback" in str(error) else 0] if lines else ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
