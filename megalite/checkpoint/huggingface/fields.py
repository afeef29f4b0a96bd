"""Reads the fields of a `config.json`; none is silently ignored.

Key idea: each field is taken by who knows what it means. What nobody took must be on the list of fields that don't
matter to the network, or have the one value with which it doesn't. Anything else is refused by name, unless the user
says that it doesn't matter (`--ignore-config-field`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from megalite.checkpoint.errors import CheckpointError

REQUIRED: Any = object()

# Who wrote the file and how a program calls the model; token ids, which belong to the tokenizer; labels and tasks of
# heads that a language model doesn't have; how text is generated, by transformers and by KoboldAI.
_NAMES = """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _model_name_or_path
    _name_or_path architectures attn_implementation author created_date dtype is_llama_config
    keys_to_ignore_at_inference license model_type name_or_path output_attentions output_hidden_states output_scores
    pretraining_tp return_dict return_dict_in_generate tf_legacy_loss tie_last_hidden_states torch_dtype torchscript
    transformers.js_config transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache

    _num_labels bos_token bos_token_id classifier_dropout decoder_start_token_id eos_token eos_token_id
    finetuning_task forced_bos_token_id forced_eos_token_id id2label label2id num_labels pad_token pad_token_id prefix
    problem_type sep_token_id task_specific_params tokenizer_class unk_token unk_token_id

    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences remove_invalid_values repetition_penalty suppress_tokens temperature top_k top_p typical_p

    antemplate badwordsids newlinemode nobreakmodel rep_pen sampler_order temp tfs typical welcome
"""
IRRELEVANT = frozenset(_NAMES.split())
"""Fields that don't decide what the network computes."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "per_layer_config": (None,),
    "pruned_heads": ({}, None),
    "rope_interleaved": (False,),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False,),
}
"""Fields that don't matter with these values."""

NOTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
"""As `NEUTRAL`, of other programs or architectures: the user is told that they aren't used."""
_IDLE = """
    embd_pdrop gradient_checkpointing hidden_dropout line_by_line max_sequence_length n_special output_past
    predict_special_tokens resid_pdrop
"""
_WITHOUT_EFFECT = frozenset(_IDLE.split())
"""As `NOTED`, whatever their values."""

_QUANTIZED = ("quantization_config", "quantization", "compression_config")
"""Fields of weights that are stored in another form than their own."""


class UnsupportedField(CheckpointError):
    """A value of the field `name` can't be honoured."""

    def __init__(self, name: str, message: str):
        super().__init__(message)
        self.name = name


class Fields:
    """The fields of one file, or with `nested` of one object in it. `where`: its name, for messages."""

    def __init__(self, values: Mapping[str, Any], where: str, *, nested: bool = False):
        self.values, self.where, self.nested = dict(values), where, nested

    def take(self, name: str, kind: type, default: Any = REQUIRED, *, nullable: bool = False, minimum: int = 1) -> Any:
        """The value of a field, which then counts as understood; `default` where it is absent.

        null is returned as None where it means something (`nullable`), else it is as if absent. A `CheckpointError`
        names a field that is missing, of another type, or a whole number below `minimum`.
        """
        absent = name not in self.values
        value = self.values.pop(name, None)
        if value is None and not absent and nullable:
            return None
        if value is None:
            if default is REQUIRED:
                raise CheckpointError(f"{self.where} lacks {name}")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.refuse(name, value, f"it must be of type {kind.__name__}")
        if kind is int and isinstance(value, int) and value < minimum:
            self.refuse(name, value, f"it must be at least {minimum}")
        return value

    def choose(self, name: str, allowed: Collection[Any], default: Any) -> Any:
        """As `take`, for a field of which only the values `allowed` are supported."""
        value = self.values.pop(name, default)
        if value not in allowed:
            self.refuse(name, value, f"supported: {', '.join(repr(one) for one in allowed)}")
        return value

    def drop(self, *names: str) -> None:
        """These don't matter to this architecture."""
        for name in names:
            self.values.pop(name, None)

    def refuse(self, name: str, value: Any, why: str) -> NoReturn:
        """Raise an UnsupportedField for a value that can't be honoured."""
        raise UnsupportedField(name, f"{self.where}: {name} {value!r} is not supported: {why}")

    def finish(self, ignored: Collection[str] | None = ()) -> list[str]:
        """What the user should know of fields that nobody took and that are left unused, in at most one line.

        A `CheckpointError` names every such field that may matter, but for those named in `ignored`; None: the user
        was asked before, so all are left unused.
        """
        if "auto_map" in self.values:
            raise CheckpointError(f"{self.where}: auto_map: the model needs its own code, which megalite never runs")
        for name in _QUANTIZED:
            value = self.values.pop(name, None)
            if value is not None:
                method = value.get("quant_method") if isinstance(value, Mapping) else None
                raise CheckpointError(
                    f"{self.where}: {name}: the weights are quantized{f' ({method})' if method else ''}, and megalite "
                    "reads only plain ones: take the model that they were made from"
                )
        left = {name: value for name, value in self.values.items() if name not in IRRELEVANT}
        left = {name: value for name, value in left.items() if value not in NEUTRAL.get(name, ())}
        if ignored is not None:
            unknown = {
                name: value
                for name, value in left.items()
                if not (value is None or name in _WITHOUT_EFFECT or value in NOTED.get(name, ()))
            }
            self._refuse_unknown(unknown, ignored)
        return [f"{self.where}: not used: {_shown(left)}"] if left else []

    def _refuse_unknown(self, unknown: Mapping[str, Any], ignored: Collection[str]) -> None:
        known = NEUTRAL.keys() | NOTED.keys()  # other values of these are known to change the network
        for name in ignored:
            if name not in unknown or name in known:
                why = "changes what the network computes" if name in unknown else "isn't an unknown field; leave it out"
                raise CheckpointError(f"--ignore-config-field {name}: in {self.where} it {why}")
        refused = {name: value for name, value in unknown.items() if name not in ignored}
        if not refused:
            return
        advice = "They may change what the network computes"
        free = sorted(refused.keys() - known)
        if free and not self.nested:
            flags = " ".join(f"--ignore-config-field {name}" for name in free)
            advice += f"; if you know that they don't, add {flags}"
        raise CheckpointError(f"{self.where} has unknown fields: {_shown(refused)}. {advice}")


def _shown(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {str(value)[:60]}" for name, value in sorted(fields.items()))
