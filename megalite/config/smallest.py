"""The answer to a command with almost no flags: one message with a command that works, not a list of errors."""

from __future__ import annotations

from megalite.config.errors import FlagError
from megalite.config.fields import all_fields, get
from megalite.config.schema import RunConfig

FEW = 2  # up to so many missing flags, each is a line of its own

_MOCK = (
    "--preset llama-tiny --seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 130"
)
SMALLEST = {
    "pretrain_gpt.py": f"python pretrain_gpt.py {_MOCK}",
    "finetune.py": (
        "python finetune.py --load-hf DIR --sft-data FILE.jsonl --peft lora --save-adapter DIR "
        "--seq-length 512 --micro-batch-size 4 --train-iters 100 --lr 1e-4"
    ),
    "verify_parallel.py": f"python tools/verify_parallel.py --tensor-model-parallel-size 2 {_MOCK}",
}
"""A command that works as it stands, by program; DIR and FILE are the user's."""

NEEDED = (
    "model.num_layers",
    "model.hidden_size",
    "model.num_attention_heads",
    "data.seq_length",
    "training.micro_batch_size",
)
"""Fields that every run must be given, by flags, a preset or a folder."""


def missing_fields(config: RunConfig) -> list[str]:
    """The paths of `NEEDED` that nothing gave, and the learning rate where something is trained."""
    needed = NEEDED if config.validation.skip_train else (*NEEDED, "learning_rate.lr")
    return [path for path in needed if get(config, path) is None]


def refuse_few_flags(config: RunConfig, program: str) -> None:
    """A FlagError with the smallest command of `program`, where more than a few of the needed flags are missing."""
    missing = [all_fields()[path].option for path in missing_fields(config)]
    if len(missing) > FEW:
        example = SMALLEST.get(program, SMALLEST["pretrain_gpt.py"])
        raise FlagError(
            f"too few flags for a run: {', '.join(missing)} are missing. A small command that works:\n"
            f"  {example}\n--help lists all flags"
        )
