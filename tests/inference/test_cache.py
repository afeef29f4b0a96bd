"""The cache gives back what it was given, in order."""

from __future__ import annotations

import pytest
import torch

from megalite.distributed.mesh import single_process_mesh
from megalite.inference.cache import KeyValueCache
from megalite.nn import module
from tests.helpers import BF16, FP32, LLAMA, tiny_model


def test_what_comes_back_is_all_that_was_appended_to_that_layer() -> None:
    model = tiny_model(single_process_mesh(), FP32, **LLAMA)
    cache: module.KeyValueCache = KeyValueCache(model, tokens=7, batch=3)
    appended: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for count in (4, 1, 2):
        for layer in (0, 1):
            part = torch.randn(count, 3, 2, 8)
            appended[layer].append(part)
            keys, values = cache.update(layer, part, -part)
            whole = torch.cat(appended[layer])
            assert torch.equal(keys, whole)
            assert torch.equal(values, -whole)


def test_a_step_takes_no_new_memory() -> None:
    cache = KeyValueCache(tiny_model(single_process_mesh(), FP32), tokens=4, batch=1)
    part = torch.randn(1, 1, 4, 8)
    places = [[x.untyped_storage().data_ptr() for x in cache.update(0, part, part)] for _ in range(4)]
    assert all(place == places[0] for place in places)


def test_it_has_the_dtype_of_the_model() -> None:
    cache = KeyValueCache(tiny_model(single_process_mesh(), BF16), tokens=1, batch=1)
    part = torch.randn(1, 1, 4, 8, dtype=torch.bfloat16)
    assert {x.dtype for x in cache.update(1, part, part)} == {torch.bfloat16}


def test_it_does_not_grow() -> None:
    cache = KeyValueCache(tiny_model(single_process_mesh(), FP32), tokens=2, batch=1)
    part = torch.randn(3, 1, 4, 8)
    with pytest.raises(AssertionError, match="cache"):
        cache.update(0, part, part)
