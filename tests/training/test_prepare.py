"""`--deterministic-mode`: what it sets, that it ends, and on a GPU that the same numbers come every time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megalite.config.errors import FlagError
from megalite.config.resolve import resolve
from megalite.config.schema import RunConfig
from megalite.config.schema_finetune import PeftConfig
from megalite.distributed.launch import Environment
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.models.gpt import plain_tokens
from megalite.nn.module import named_specs
from megalite.training import pretrain
from megalite.training.prepare import deterministic, prepare_config, prepare_determinism, size_problems
from tests.helpers import BF16, LLAMA, tiny_model, tiny_tokens
from tests.peft.runs import adapter_config

CUDA, VARIABLES = torch.device("cuda"), ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")


@pytest.mark.parametrize("wanted", [True, False])
def test_torchs_switch_is_on_while_the_run_lasts_and_then_as_before(
    wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    @contextlib.contextmanager
    def start(*_: object) -> Iterator[Mesh]:
        seen.append(torch.are_deterministic_algorithms_enabled())
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(pretrain, "start", start)
    flags = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8"
    flags += " --mock-data --tokenizer-type NullTokenizer --vocab-size 10 --micro-batch-size 1 --lr 1 --train-iters 1"
    with pytest.raises(KeyboardInterrupt):
        pretrain.train(
            [*flags.split(), "--device", "cpu", *(["--deterministic-mode"] if wanted else [])],
            Environment(),
            program="",
            description="",
        )
    assert seen == [wanted]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_network_beyond_what_numbers_can_count_is_refused() -> None:
    config = adapter_config("none", ffn_hidden_size=1 << 62)
    assert "at most 1e+15 are possible" in size_problems(resolve(config, 1).model, 131)[0]
    assert size_problems(resolve(adapter_config("none"), 1).model, 131) == []


def test_a_program_that_names_an_adapter_without_its_kind_is_refused() -> None:
    config = RunConfig(peft=PeftConfig(load_adapter="adapter"))
    with pytest.raises(FlagError, match="--load-adapter adapter: give the kind"):
        prepare_config(config, Environment())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"fp8_backend": "te"}, "--fp8-backend te needs a GPU, but this run is on cpu; use auto"),
        (
            {"fp8_backend": "torch", "fp8_recipe": "mxfp8"},
            "--fp8-backend torch has no scales of blocks on a CPU; use auto",
        ),
    ],
)
def test_a_back_end_of_fp8_that_cannot_run_is_refused(flags: dict[str, str], message: str) -> None:
    config = adapter_config("none", fp64=False, bf16=True, fp8_format="e4m3", **flags)
    with pytest.raises(FlagError, match=message):
        prepare_config(resolve(config, 1), Environment())


def test_what_cublas_and_nccl_read_is_set_before_cuda_starts_and_a_users_own_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    prepare_determinism(torch.device("cpu"))
    assert not any(name in os.environ for name in VARIABLES)
    prepare_determinism(CUDA)
    assert [os.environ[name] for name in VARIABLES] == [":4096:8", "Ring"]
    for name, value in zip(VARIABLES, (":16:8", "^NVLS"), strict=True):
        monkeypatch.setenv(name, value)
    prepare_determinism(CUDA)
    assert [os.environ[name] for name in VARIABLES] == [":16:8", "^NVLS"]


@pytest.mark.parametrize(("name", "value"), [("CUBLAS_WORKSPACE_CONFIG", ":0:0"), ("NCCL_ALGO", "NVLS,Ring")])
def test_a_setting_that_allows_sums_in_any_order_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in VARIABLES:
        monkeypatch.setenv(other, ":16:8" if other == VARIABLES[0] else "Ring")
    monkeypatch.setenv(name, value)
    with pytest.raises(FlagError, match=f"--deterministic-mode: the environment has {name}={value}"):
        prepare_determinism(CUDA)


@pytest.mark.cuda
@pytest.mark.parametrize("window", [None, "32,0"])
def test_on_cuda_a_backward_gives_the_same_bits_every_time(window: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many equal tokens, whose rows of the embedding are summed, and long attention, whose queries' gradients are."""
    for name in VARIABLES:
        monkeypatch.setenv(name, ":4096:8" if name == VARIABLES[0] else "Ring")
    mesh = single_process_mesh(CUDA)
    text = tiny_tokens(4, 1024, vocab_size=7).to(CUDA)

    def gradients() -> dict[str, Tensor]:
        model = tiny_model(
            mesh, BF16, vocab_size=7, **LLAMA, max_position_embeddings=1024, hidden_size=128, window_size=window
        )
        hidden = model(text[:, :-1], plain_tokens(text[:, :-1]))
        model.loss(hidden, text[:, 1:]).total.backward()
        return {name: p.grad for name, p, _ in named_specs(model) if p.grad is not None}

    with deterministic(True):
        first = gradients()
        for _ in range(4):
            assert all(torch.equal(grad, first[name]) for name, grad in gradients().items())
