"""A small chat tokenizer in Hugging Face's format, and conversations, for the tests of fine-tuning data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from tests.data.corpora import byte_level

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
# As Qwen3's: reasoning is dropped from answers before the last question, kept and closed after it; tools are listed in
# the system's turn, and calls and their results have marks of their own.
REASONING_TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
# As GLM-4's: a turn ends where the next one's mark begins, and a call is a turn of a name and its arguments.
UNCLOSED_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "{{ call.name + '\n' + (call.arguments | tojson) }}{% endfor %}"
    "{% else %}{{ '\n' + message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
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
    byte_level(400, *SPECIAL).save(str(folder / "tokenizer.json"))
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


def put_template(folder: Path, template: str) -> Path:
    """Have the tokenizer.json in `folder` put special tokens around every text, as in `<|begin|> $A <|im_end|>`."""
    file = str(folder / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(file)
    special = [(name, backend.token_to_id(name)) for name in template.split() if name != "$A"]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
    backend.save(file)
    return folder


def write_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values), encoding="utf-8")
    return str(path)


def pairs(count: int) -> list[dict[str, str]]:
    """Prompts and completions of different lengths."""
    return [
        {"prompt": f"Count to {n}:", "completion": " " + " ".join(map(str, range(n % 17 + 1)))} for n in range(count)
    ]
