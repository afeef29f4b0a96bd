"""Package metadata of megalite. The tools' settings are in pyproject.toml, the pinned versions in requirements.lock.

A range claims only what the tests ran with: it starts at the locked version and ends before the next release that may
change behaviour.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

DEPENDENCIES = [
    "torch>=2.13.0,<2.14",  # tensors, autograd, collectives
    "numpy>=2.4.6,<2.5",  # memory-mapped datasets and sample indices; the shuffles are RandomState's
    "sentencepiece>=0.2.3,<0.3",  # trains and reads SentencePiece models
    "tokenizers>=0.23.3,<0.24",  # reads tokenizer.json and GPT-2 BPE
    "tiktoken>=0.14.0,<0.15",  # byte-level BPE from tiktoken rank files
    "zstandard>=0.25.0,<0.26",  # reads .jsonl.zst
    "tqdm>=4.70.1,<5",  # progress bars of the tools
    "tensorboard>=2.21.0,<2.22",  # torch.utils.tensorboard imports it
    "safetensors>=0.8.0,<0.9",  # tensors on disk without pickle
    "regex>=2026.11.19,<2027",  # matches an adapter's patterns (untrusted input) with a time limit
    "matplotlib>=3.11.2,<3.12",  # draws pipeline schedules
]

# An extra exists once code uses it.
HF = [
    "transformers>=5.24.0,<5.25",  # the independent truth for models that Hugging Face has too
]
SERVE = [
    "starlette>=1.10.0,<1.11",  # routes, requests, streamed answers of tools/generate.py --serve
    "uvicorn>=0.54.0,<0.55",  # speaks HTTP; the server bounds its connections through its protocol class
    "pydantic>=2.14.4,<2.15",  # checks requests
]
S3 = [
    "s3fs>=2026.9.0,<2027",  # s3:// for fsspec: checkpoints, adapters, metrics and data in object storage
]
TEST = [
    *HF,
    *SERVE,
    *S3,
    "openai>=3.57.0,<3.58",  # the independent truth for the server: the official client
    "moto[s3]>=5.2.5,<6",  # a server of the S3 protocol on this machine
    "flask>=3.1.3,<4",  # what that server runs on; moto's own extra for it brings a dozen packages more
    "flask-cors>=6.0.5,<7",  # it imports this too
    "pytest>=9.2.0,<10",  # runs the tests
    "pytest-timeout>=2.4.0,<3",  # one hung test fails alone
    "pytest-xdist>=3.8.0,<4",  # runs test files beside each other
    # the truth for dataset bytes and sample order, so one release exactly; it has no wheel for Python 3.14
    "megatron-core==0.16.1; python_version < '3.14'",
]
DEV = [
    *TEST,
    "peft==0.21.2",  # the independent truth for adapters and their files, so one release exactly
    "ruff>=0.17.6,<0.18",  # lint and format; a minor release may format otherwise
    "mypy>=2.4.1,<2.5",  # type checker
    "types-tqdm>=4.70.0.20261106,<5",  # tqdm ships no types
]


def version() -> str:
    """`__version__` as the package's source states it; importing the package could need torch."""
    source = (ROOT / "megalite" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, flags=re.MULTILINE)
    if match is None:
        raise ValueError("megalite/__init__.py has no line __version__ = ...")
    return match.group(1)


setup(
    name="megalite",
    version=version(),
    description="A Megatron-style training framework for transformer language models that one person can read",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["megalite", "megalite.*"]),
    package_data={"megalite.config": ["megatron_flags.tsv"]},
    install_requires=DEPENDENCIES,
    extras_require={"hf": HF, "serve": SERVE, "s3": S3, "test": TEST, "dev": DEV},
)
