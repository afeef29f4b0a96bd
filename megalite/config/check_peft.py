"""What can be wrong with adapters: names of targets, and combinations with the network and its layout.

Key idea: a target is a name that Hugging Face gives a linear layer, of this network or of another that has the same
layer in other parts (queries alone, or queries, keys and values together); so any network takes any of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import all_fields, get
from megalite.config.resolve import expert_layers
from megalite.config.schema import ModelConfig, RunConfig
from megalite.config.schema_finetune import PeftConfig

ALL_LINEAR = "all-linear"

_GATED: dict[str, tuple[str, ...]] = {
    "gate_proj": ("gate_proj",),
    "up_proj": ("up_proj",),
    "gate_up_proj": ("gate_up_proj",),
    "down_proj": ("down_proj",),
}
_GPT2: dict[str, tuple[str, ...]] = {
    "c_attn": ("c_attn",),
    "c_proj": ("o_proj", "down_proj"),
    "c_fc": ("up_proj",),
}
_PLAIN: dict[str, tuple[str, ...]] = {
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
_EXPERTS = ("experts_up_proj", "experts_gate_up_proj", "experts_down_proj")
_FUSED = {"c_attn": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora")
_NEEDS = {
    **dict.fromkeys(_LORA, ("--peft lora", ("lora",))),
    "num_virtual_tokens": ("--peft prefix or prompt", ("prefix", "prompt")),
    "prefix_projection": ("--peft prefix", ("prefix",)),
    "prefix_hidden_size": ("--peft prefix", ("prefix",)),
    "prompt_init_text": ("--peft prompt", ("prompt",)),
    "save_adapter": ("--peft lora, prefix or prompt", ("lora", "prefix", "prompt")),
    "save_best_adapter": ("--peft lora, prefix or prompt", ("lora", "prefix", "prompt")),
}

# What the folder of `--load-adapter` has instead of what these flags mean.
_DECIDED = {
    "lora_target_modules": "targets of its own",
    "prefix_projection": "the vectors that the projection computed, not the projection",
    "prompt_init_text": "vectors of its own",
}


def contradiction(flag: str, folder: str, value: object) -> str:
    """Why a flag, shown with its value, can't stand beside the folder of `--load-adapter`, which has `value`."""
    return f"{flag}: --load-adapter {folder} has {value}; leave the flag out"


def attention_parts(model: ModelConfig) -> tuple[str, ...]:
    """The linear layers of attention; of multi-latent attention by DeepSeek's names."""
    if not model.multi_latent_attention:
        return "q_proj", "k_proj", "v_proj", "o_proj"
    queries = ("q_proj",) if model.q_lora_rank is None else ("q_a_proj", "q_b_proj")
    return *queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"


def has_mlp(model: ModelConfig) -> bool:
    """Whether there is one that isn't of routed experts alone."""
    if model.moe_shared_expert_intermediate_size is not None or model.num_experts is None:
        return True
    try:
        return not all(expert_layers(model))
    except ValueError:  # is told of as what it is
        return True


def target_names(peft: PeftConfig, model: ModelConfig) -> list[str]:
    """`--lora-target-modules` as single names, by default those of attention; commas separate as blanks do."""
    words = attention_parts(model) if peft.lora_target_modules is None else peft.lora_target_modules
    return [name for word in words for name in word.replace(",", " ").split()]


def valid_targets(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Names that `--lora-target-modules` takes for this network, and the parts of it that each means."""
    attention: dict[str, tuple[str, ...]] = {name: (name,) for name in attention_parts(model)}
    if model.num_experts is not None:
        first = "gate_up_proj" if model.swiglu else "up_proj"
        attention |= {f"experts.{name}": (f"experts_{name}",) for name in (first, "down_proj")}
    if not has_mlp(model):
        gpt2 = {} if model.swiglu or model.multi_latent_attention else {"c_attn": ("c_attn",), "c_proj": ("o_proj",)}
        return {**attention, **gpt2}
    if model.swiglu:
        return {**attention, **_GATED}
    return {**attention, **({} if model.multi_latent_attention else _GPT2), **_PLAIN}


def lora_parts(model: ModelConfig, names: list[str]) -> list[str]:
    """The parts that valid target names mean, each once, in the order of the network."""
    table = valid_targets(model)
    if ALL_LINEAR in names:  # what Hugging Face's model has as one layer gets one pair of matrices
        latent = model.multi_latent_attention
        names = [*attention_parts(model), "up_proj", "down_proj"] if latent else ["c_attn", "c_proj", "c_fc"]
        if model.swiglu:
            fused = model.rotary_interleaved and not latent
            names = [*attention_parts(model), *(["gate_up_proj"] if fused else ["gate_proj", "up_proj"]), "down_proj"]
        names = [name for name in names if name in table]
    wanted = {part for name in names for part in table[name]}
    return [part for part in ("c_attn", *attention_parts(model), *_GATED, *_EXPERTS) if part in wanted]


def peft_problems(config: RunConfig) -> Iterator[str]:
    """Problems of the section `peft`."""
    peft = config.peft
    fields = all_fields()
    for name, (reason, kinds) in _NEEDS.items():
        field = fields[f"peft.{name}"]
        value = get(config, field.path)
        kind_unknown = peft.load_adapter is not None and peft.peft == "none"  # the folder says the kind
        if value == field.default:
            continue
        if peft.peft not in kinds and not kind_unknown:
            yield f"{field.show(value)} needs {reason}"
        elif peft.load_adapter is not None and name in _DECIDED:
            yield contradiction(field.show(value), peft.load_adapter, _DECIDED[name])
    if peft.prefix_hidden_size is not None and not peft.prefix_projection:
        yield f"--prefix-hidden-size {peft.prefix_hidden_size} needs --prefix-projection"
    if peft.peft == "lora":
        yield from _target_problems(config)
    if peft.peft in ("prefix", "prompt"):
        yield from _virtual_token_problems(config)


def idle_beside_adapters(config: RunConfig) -> Iterator[tuple[str, list[str]]]:
    """As `check.without_effect` needs it: what a frozen model makes meaningless."""
    if config.peft.peft != "none" and config.finetune.task != "classification":
        names = ["decoupled_lr", "decoupled_min_lr"]
        yield (
            f"with --peft {config.peft.peft}, where embedding and output are frozen",
            [f"learning_rate.{name}" for name in names],
        )


def _target_problems(config: RunConfig) -> Iterator[str]:
    valid, names = valid_targets(config.model), target_names(config.peft, config.model)
    listed = f"valid for this network: {', '.join(valid)}; or {ALL_LINEAR} alone"
    if not names:
        yield f"--lora-target-modules names no layer; {listed}"
    for name in names:
        if name not in valid and name != ALL_LINEAR:
            yield f"--lora-target-modules {name} is not the name of a linear layer; {listed}"
    if ALL_LINEAR in names and len(names) > 1:
        yield f"--lora-target-modules {','.join(names)}: {ALL_LINEAR} already means every linear layer"
    of_experts = [name for name in names if name.startswith("experts.") and name in valid]
    folders = {"--save-adapter": config.peft.save_adapter, "--save-best-adapter": config.peft.save_best_adapter}
    for flag, folder in folders.items() if of_experts else ():
        if folder is not None:
            yield (
                f"{flag} {folder} with --lora-target-modules {of_experts[0]}: only checkpoints (--save) hold it, and "
                "tools/merge_adapter.py --load merges it"
            )
    if of_experts and config.peft.lora_dropout:
        yield f"--lora-dropout {config.peft.lora_dropout} with --lora-target-modules {of_experts[0]} must be 0"
    for whole, parts in _FUSED.items():
        if whole in names and set(parts) & set(names):
            yield f"--lora-target-modules {','.join(names)}: {whole} already means {', '.join(parts)}"


def _virtual_token_problems(config: RunConfig) -> Iterator[str]:
    peft, model, layout, length = config.peft, config.model, config.layout, config.data.seq_length
    flag = f"--num-virtual-tokens {peft.num_virtual_tokens}"
    longest = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else None
    if length is not None and longest is not None and length + peft.num_virtual_tokens > longest:
        yield (
            f"{flag} and --seq-length {length} are more than the network's {longest} learned positions "
            f"(--max-position-embeddings): --seq-length may be at most {max(0, longest - peft.num_virtual_tokens)}"
        )
    if model.window_size is not None:
        yield f"--peft {peft.peft} with --window-size: later tokens could not attend to the virtual tokens"
    apart = config.finetune.sft_packing or config.data.reset_position_ids
    if peft.peft == "prompt" and apart and model.position_embedding_type in ("dynamic", "longrope"):
        yield (
            f"--peft prompt with --sft-packing or --reset-position-ids: {model.position_embedding_type} positions "
            "depend on a document's length, and the virtual tokens of a row with several documents have no single one"
        )
    tp = layout.tensor_model_parallel_size
    if peft.peft == "prompt" and layout.sequence_parallel and peft.num_virtual_tokens % tp:
        yield f"--sequence-parallel: --tensor-model-parallel-size {tp} does not divide {flag}"
