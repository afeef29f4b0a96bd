"""The project's own lint rules, which no general linter knows. Run by `make lint`; standard library only.

Each rule is a function from one parsed file to its findings, so a test can feed it a snippet. The rules:

- levels: a package in `megalite/` imports only from packages on lower levels (FLOORS; docs/architecture.md says why).
- wide dtype: no literal fp32 in WIDE_ROOMS; "fp32" there means the precision policy's wide dtype, which is fp64 in
  proof mode.
- light config: `megalite/config/` imports the standard library alone, so neither torch nor numpy: `--help` is instant.
- thin entry points: a script parses, builds and calls; it has fewer than MAX_ENTRY_LINES lines.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

FLOORS = {
    "config": 0,
    "files": 1,
    "distributed": 1,
    "estimate": 1,
    "precision": 2,
    "data": 2,
    "pipeline": 2,
    "nn": 3,
    "optimizer": 3,
    "models": 4,
    "checkpoint": 4,
    "peft": 5,
    "inference": 5,
    "training": 6,
    "verify": 7,
    "planner": 6,
}
WIDE_ROOMS = {"nn", "models", "optimizer"}
FP32_NAMES = {"float32", "float", "FloatTensor"}
MAX_ENTRY_LINES = 80
ENTRY_POINTS = ("pretrain_gpt.py", "finetune.py", "tools/*.py")


@dataclass(frozen=True, order=True)
class Finding:
    """One broken rule at one place; `path` is relative to the project's root."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def room_of(path: str) -> str | None:
    """The package in `megalite/` that a file is in; None for `megalite/__init__.py` and files outside it."""
    parts = PurePosixPath(path).parts
    return parts[1] if len(parts) > 2 and parts[0] == "megalite" else None


def imported_modules(path: str, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(absolute dotted name, line) of every import in a file, at any depth; of `from a import b` it's `a.b`."""
    package = PurePosixPath(path).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield ".".join([*base, alias.name]), node.lineno


def check_floors(path: str, tree: ast.AST) -> Iterator[Finding]:
    """Packages import downwards only; `megalite/__init__.py` imports none, so that importing it is cheap."""
    parts = PurePosixPath(path).parts
    if parts[0] != "megalite":
        return
    room = room_of(path)
    if room is not None and room not in FLOORS:
        yield Finding(path, 1, f"package {room!r} has no level: add it to FLOORS in tests/lint_rules.py")
        return
    for name, line in imported_modules(path, tree):
        head, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if head != "megalite" or target not in FLOORS or target == room:
            continue
        if room is None:
            yield Finding(path, line, f"{path} imports {target!r}, but must import no package")
        elif FLOORS[target] >= FLOORS[room]:
            yield Finding(
                path,
                line,
                f"{room} (level {FLOORS[room]}) imports {target} (level {FLOORS[target]}), not a lower level",
            )


def check_wide_dtype(path: str, tree: ast.AST) -> Iterator[Finding]:
    """Where values may be computed in the wide dtype, no line says fp32 itself."""
    if room_of(path) not in WIDE_ROOMS:
        return
    torch_names = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            torch_names |= {alias.asname for alias in node.names if alias.name == "torch" and alias.asname}
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr | ast.stmt):
            continue
        spelled = None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in torch_names:
            spelled = f"torch.{node.attr}" if node.attr in FP32_NAMES else None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "float":
            spelled = ".float()"
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            spelled = next((f"torch.{alias.name}" for alias in node.names if alias.name in FP32_NAMES), None)
        if spelled is not None:
            yield Finding(path, node.lineno, f"literal {spelled}: use the precision policy's wide dtype")


def check_light_config(path: str, tree: ast.AST) -> Iterator[Finding]:
    """The configuration needs nothing but Python."""
    if room_of(path) != "config":
        return
    for name, line in imported_modules(path, tree):
        head = name.partition(".")[0]
        if head != "megalite" and head not in sys.stdlib_module_names:
            yield Finding(path, line, f"config imports {head}: only the standard library is allowed there")


def check_entry_point(path: str, source: str) -> Iterator[Finding]:
    """Scripts are thin."""
    lines = len(source.splitlines())
    if any(fnmatch(path, pattern) for pattern in ENTRY_POINTS) and lines >= MAX_ENTRY_LINES:
        yield Finding(path, lines, f"entry point of {lines} lines: keep it under {MAX_ENTRY_LINES}")


def check_source(path: str, source: str) -> list[Finding]:
    """All findings in one file, in order. `path` decides which rules apply: relative to the root, with slashes."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        return [Finding(path, error.lineno or 1, f"does not parse: {error.msg}")]
    findings = [
        *check_floors(path, tree),
        *check_wide_dtype(path, tree),
        *check_light_config(path, tree),
        *check_entry_point(path, source),
    ]
    return sorted(set(findings))


def check_project(root: Path) -> list[Finding]:
    """All findings in the package and the entry points below `root`."""
    files = [file for pattern in ("megalite/**/*.py", *ENTRY_POINTS) for file in sorted(root.glob(pattern))]
    return [
        finding
        for file in files
        for finding in check_source(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8"))
    ]


def main() -> int:
    findings = check_project(Path(__file__).resolve().parent.parent)
    for finding in findings:
        print(finding)
    print(f"lint_rules: {len(findings)} findings" if findings else "lint_rules: all rules hold")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
