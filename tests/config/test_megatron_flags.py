"""Every flag of Megatron-LM has one answer, and the right number of values.

`megatron_lm_flags.txt` is what Megatron-LM's own parser says: spellings, number of values, default, choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from megalite.config.errors import FlagError
from megalite.config.fields import all_fields
from megalite.config.flags import build_parser, explicit_fields, parse_namespace, read_run
from megalite.config.megatron_flags import (
    IGNORED,
    current_flags,
    earlier_flags,
    foreign_values,
    honoured_fields,
    shorthands,
)
from megalite.config.schema import RunConfig
from tests.helpers import load_tool

ROOT = Path(__file__).resolve().parents[2]

# Fields whose default differs from Megatron-LM's on purpose.
OTHER_DEFAULTS = {
    "layout.data_parallel_sharding_strategy",  # shards nothing, or what --use-distributed-optimizer says
    "layout.distributed_backend",  # by device
    "layout.cp_comm_type",  # of a list, what it is where nothing is given
    "model.moe_router_load_balancing_type",
    "model.moe_aux_loss_coeff",
}

# Values that Megatron-LM lacks.
OWN_CHOICES = {
    "--position-embedding-type": {"dynamic", "longrope"},
    "--main-params-dtype": {"bf16"},
    "--cp-comm-type": {"p2p", "all_gather", "a2a", "a2a+p2p"},  # named in its help alone
}

# One value with blanks, which Megatron-LM's own script passes unquoted.
ALSO_UNQUOTED = {"--step-batch-size-schedule"}


@dataclass(frozen=True)
class Theirs:
    names: tuple[str, ...]
    values: str
    default: str
    choices: tuple[str, ...]


def megatron_lm_flags() -> list[Theirs]:
    text = Path(__file__).with_name("megatron_lm_flags.txt").read_text(encoding="utf-8").replace("\n  ", " ")
    flags = []
    for row in text.splitlines():
        if not row.startswith("#"):
            values, default, choices, spellings = (part.strip() for part in row.split(" | "))
            flags += [
                Theirs(tuple(each.split("/")), values, default, tuple(choices.split())) for each in spellings.split()
            ]
    return flags


THEIRS = megatron_lm_flags()
BY_NAME = {name: flag for flag in THEIRS for name in flag.names}


PARSER = build_parser("p", "d")  # it keeps nothing between two calls


def parse(argv: list[str]) -> tuple[RunConfig, set[str], list[str]]:
    namespace, notes = parse_namespace(PARSER, argv)
    return read_run(namespace), explicit_fields(namespace), notes


def notes_of(*argv: str) -> list[str]:
    return parse(list(argv))[2]


def words_for(flag: Theirs) -> list[str]:
    return {"0": [], "3": ["1", "1", "1"]}.get(flag.values, ["1"])


def test_the_table_covers_exactly_the_839_flags_each_once() -> None:
    ours = [("-h", "--help")]
    ours += [flag.names for flag in current_flags()]
    ours += [(name,) for name in shorthands()]
    ours += [(field.option, *field.aliases) for field in honoured_fields()]
    assert len(ours) == 839 == len(THEIRS)
    assert {frozenset(names) for names in ours} == {frozenset(flag.names) for flag in THEIRS}
    assert not {name for flag in earlier_flags() for name in flag.names} & set(BY_NAME)


def test_every_flag_takes_as_many_values_as_in_megatron() -> None:
    taken = {name: action.nargs for action in build_parser("p", "d")._actions for name in action.option_strings}
    for name, flag in BY_NAME.items():
        if flag.values in {"+", "*", "3"} or name in ALSO_UNQUOTED:
            assert taken[name] in ("+", "*"), name
        else:
            assert taken[name] == {"0": 0, "1": None}[flag.values], name


def test_honoured_flags_have_megatrons_defaults() -> None:
    for field in honoured_fields():
        theirs = BY_NAME[field.option].default
        if field.kind is bool or field.path in OTHER_DEFAULTS:
            continue
        if field.default is None or theirs == "":
            assert (field.default, theirs) == (None, ""), field.path
        elif field.kind is str:
            assert field.default == theirs, field.path
        else:
            assert float(field.default) == float(theirs), field.path


def test_honoured_flags_take_all_values_of_megatron_or_name_those_they_lack() -> None:
    for field in honoured_fields():
        theirs = set(BY_NAME[field.option].choices)
        ours = {str(choice) for choice in field.choices or ()} - OWN_CHOICES.get(field.option, set())
        assert ours | set(foreign_values().get(field.option, {})) == theirs, field.path


def test_megatrons_values_that_we_lack_are_refused_by_name_with_the_valid_ones() -> None:
    for option, values in foreign_values().items():
        field = next(field for field in all_fields().values() if field.option == option)
        for value, same in values.items():
            if same is not None:
                config = parse([option, value])[0]
                assert getattr(getattr(config, field.section), field.name) == same
                continue
            with pytest.raises(FlagError) as caught:
                parse([option, value])
            message = str(caught.value)
            assert message.startswith(f"{option}: {value} ")
            assert all(str(choice) in message for choice in field.choices or ())


def test_an_ignored_flag_takes_its_values_and_says_why_in_one_line() -> None:
    ignored = [
        flag for flag in current_flags() if flag.answer == IGNORED and "--no-position-embedding" not in flag.names
    ]
    assert len(ignored) > 490
    for flag in ignored:
        for name in flag.names:
            words = [name, *words_for(BY_NAME[name])]
            assert notes_of(*words) == [f"{' '.join(words)} is ignored: {flag.reason}"]


def test_a_refused_flag_is_refused_by_name() -> None:
    refused = [flag for flag in [*current_flags(), *earlier_flags()] if flag.answer != IGNORED]
    for flag in refused:
        for name in flag.names:
            value = [] if flag.nargs == 0 else ["99"]
            with pytest.raises(FlagError) as caught:
                parse([name, *value])
            assert str(caught.value).startswith(" ".join([name, *value]))
            assert flag.reason in str(caught.value)


def test_a_refused_flag_with_megatrons_default_is_harmless() -> None:
    for flag in current_flags():
        default = BY_NAME[flag.names[0]].default
        if flag.answer != IGNORED and default:
            (note,) = notes_of(flag.names[0], default)
            assert note == f"{flag.names[0]} {default} is ignored: this value changes nothing"


def test_numbers_are_harmless_in_any_spelling() -> None:
    assert len(notes_of("--glu-linear-offset", "0", "--mid-level-dataset-surplus", "5e-3")) == 2


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--batch-size 4", "use --micro-batch-size instead"),
        ("--hybrid-context-parallel", "is not built yet: other kinds of parallelism; take it out$"),
        ("--ckpt-format torch", "; take it out, or give torch_dist or torch_dcp$"),
        ("--spec my_module my_spec", "--spec my_module my_spec would change results"),
    ],
)
def test_a_refusal_says_what_to_give_instead_or_to_take_out(argv: str, message: str) -> None:
    with pytest.raises(FlagError, match=message):
        parse(argv.split())


def test_all_refusals_are_reported_at_once() -> None:
    with pytest.raises(FlagError) as caught:
        parse(["--moe-latent-size", "8", "--moe-router-topk", "2", "--use-mup", "--num-layer", "3"])
    *lines, last = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["unknown", "--moe-latent-size", "--use-mup"]
    assert last == "to run, remove these flags: --moe-latent-size 8 --use-mup"


def test_a_note_is_given_once_for_a_repeated_flag() -> None:
    assert len(notes_of("--use-mcore-models", "--use-mcore-models", "--transformer-impl", "local")) == 2


def test_shorthands_set_the_field_that_they_stand_for() -> None:
    argv = "--use-flash-attn --use-rotary-position-embeddings --encoder-num-layers 3 --encoder-seq-length 5"
    config, explicit, notes = parse(argv.split())
    assert (config.model.attention_backend, config.model.position_embedding_type) == ("flash", "rope")
    assert (config.model.num_layers, config.data.seq_length) == (3, 5)
    assert len(explicit) == 4
    assert notes == []


def test_no_position_embedding_goes_with_rotary_or_none_alone() -> None:
    with pytest.raises(FlagError, match="use --position-embedding-type rope or none instead"):
        notes_of("--no-position-embedding")
    with pytest.raises(FlagError, match="use --position-embedding-type rope or none instead"):
        notes_of("--no-position-embedding", "--position-embedding-type", "learned_absolute")
    assert len(notes_of("--no-position-embedding", "--use-rotary-position-embeddings")) == 1
    assert len(notes_of("--position-embedding-type", "none", "--no-position-embedding")) == 1


def test_the_committed_document_is_current() -> None:
    committed = (ROOT / "docs" / "megatron_flags.md").read_text(encoding="utf-8")
    assert committed == load_tool(ROOT / "docs" / "megatron_flags.py").document(), "run: python docs/megatron_flags.py"
