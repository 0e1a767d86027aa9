"""Parts of the benchmarks' layers are compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from benchmarks.gpu.training.layers import compile_layers
from tests.support.tiny_models import TINY_LLAMA


def test_parts_of_layers_are_compiled_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_by_name(function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        assert dynamic, "a batch of another number of rows must not compile again"
        compiled.append(function.__qualname__)
        return lambda *args, **kwargs: function(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", compile_by_name)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    auto: Any = AutoModelForCausalLM  # from_config has no annotations
    model = auto.from_config(AutoConfig.for_model("llama", **TINY_LLAMA))
    ids = torch.arange(10)[None]
    before = model(ids).logits
    compile_layers(list(model.model.layers))
    assert sorted(compiled) == [
        "LlamaMLP.forward",
        "LlamaRMSNorm.forward",
        "apply_rotary_pos_emb",
    ]
    assert torch.equal(model(ids).logits, before)
