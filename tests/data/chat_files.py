"""A small chat tokenizer in Hugging Face's format, and conversations, for the tests of fine-tuning data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from tests.data.corpora import SAMPLES

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>")

# As real models have them: ChatML of several, brackets as Llama 2.
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BRACKET_TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}
{{ ' ' + message['content'] | trim + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}
{%- endif %}
{% endfor %}"""
GENERATION_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN_TEMPLATE = (  # no end of turn
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# Reasoning is written for the last answer alone.
FORGETFUL_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATION = [
    SYSTEM,
    {"role": "user", "content": "What's 2 + 2?"},
    {"role": "assistant", "content": "4, of course.\n\nIsn't it?"},
    {"role": "user", "content": " 今天天气很好 "},
    {"role": "assistant", "content": "👍🏽 def add(a: int, b: int)"},
]


def chat_tokenizer(folder: Path, template: str | None = CHATML_TEMPLATE, **config: Any) -> Path:
    """A byte-level BPE with ChatML's special tokens; `<|im_end|>` is EOS and pad. `config` changes its
    tokenizer_config.json; None takes an entry out."""
    folder.mkdir(parents=True, exist_ok=True)
    learner = tokenizers.ByteLevelBPETokenizer()
    learner.train_from_iterator(SAMPLES * 3, vocab_size=400, special_tokens=list(SPECIAL), show_progress=False)
    learner.save(str(folder / "tokenizer.json"))
    values: dict[str, Any] = {
        "bos_token": "<|begin|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
        **config,
    }
    values = {key: value for key, value in values.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def write_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values), encoding="utf-8")
    return str(path)


def pairs(count: int) -> list[dict[str, str]]:
    """Prompts and completions of different lengths."""
    return [
        {"prompt": f"Count to {n}:", "completion": " " + " ".join(map(str, range(n % 17 + 1)))} for n in range(count)
    ]
