"""The architectures that can be read and written. A new one is one file with its table, and a line here."""

from __future__ import annotations

from megalite.checkpoint.huggingface.architecture import Architecture
from megalite.checkpoint.huggingface.glm import GLM
from megalite.checkpoint.huggingface.gpt2 import GPT2
from megalite.checkpoint.huggingface.llama import LLAMA
from megalite.checkpoint.huggingface.mistral import MISTRAL
from megalite.checkpoint.huggingface.qwen2 import QWEN2
from megalite.checkpoint.huggingface.qwen3 import QWEN3

ARCHITECTURES: dict[str, Architecture] = {one.model_type: one for one in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GLM)}
"""By `model_type`; where several can express a network, the first is written."""
