"""Devices, presets and layers: what training on a GPU adds to the settings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from distca.apps.local.launcher import configured_shape
from distca.apps.train.device import (
    ALLOCATOR_VARIABLES,
    choose_device,
    prefer_expandable_segments,
    prefer_many_queues,
)
from distca.apps.train.language_model import LanguageModel, has_plain_head
from distca.apps.train.layers import compile_layers, decoder_layers
from distca.apps.train.model import build_model, model_config
from distca.apps.train.run import chosen
from distca.apps.train.settings import (
    DeviceName,
    ModelSettings,
    Preset,
    Sharding,
    TrainingSettings,
)
from distca.errors import ModelConfigError, SettingsError

TINY = ModelSettings(hidden_size=16, layers=2, heads=4, kv_heads=2)


@pytest.mark.parametrize(
    ("name", "n_devices", "expected"),
    [
        (DeviceName.CPU, 4, "cpu"),
        (DeviceName.AUTO, 0, "cpu"),
        (DeviceName.AUTO, 4, "cuda:2"),
        (DeviceName.CUDA, 4, "cuda:2"),
    ],
)
def test_device_is_that_of_the_local_rank(
    monkeypatch: pytest.MonkeyPatch, name: DeviceName, n_devices: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_devices)
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    monkeypatch.setattr(os, "environ", {})
    device = choose_device(name, local_rank=2)
    assert device == torch.device(expected)
    assert made_current == ([device] if device.type == "cuda" else [])


@pytest.mark.parametrize("chosen", ["", *ALLOCATOR_VARIABLES])
def test_a_setting_of_pytorchs_allocator_is_kept(
    monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    told = {chosen: "max_split_size_mb:64"} if chosen else {}
    environ = dict(told)
    monkeypatch.setattr(os, "environ", environ)
    prefer_expandable_segments()
    assert environ == (told or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


@pytest.mark.parametrize("told", [{}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}])
def test_a_number_of_hardware_queues_is_kept(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str]
) -> None:
    environ = dict(told)
    monkeypatch.setattr(os, "environ", environ)
    prefer_many_queues()
    assert environ == (told or {"CUDA_DEVICE_MAX_CONNECTIONS": "32"})


EXPANDABLE = """
import torch
from distca.apps.train.device import choose_device, prepare_process
from distca.apps.train.settings import DeviceName
prepare_process(choose_device(DeviceName.CUDA, 0))
torch.ones(1, device="cuda")
print([segment["is_expandable"] for segment in torch.cuda.memory_snapshot()])
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pytorchs_cache_grows_in_place() -> None:
    environ = {k: v for k, v in os.environ.items() if k not in ALLOCATOR_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE],
        env=environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["[True]"], done.stderr


@pytest.mark.parametrize("n_devices", [0, 2])
def test_missing_device_is_named(monkeypatch: pytest.MonkeyPatch, n_devices: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_devices)
    with pytest.raises(SettingsError, match=f"device 2, and there are {n_devices}"):
        choose_device(DeviceName.CUDA, local_rank=2)


def test_preset_has_the_sizes_of_its_model() -> None:
    settings = ModelSettings(model_preset=Preset.LLAMA_3_8B)
    config = model_config(settings, max_positions=2**17)
    assert (config.num_hidden_layers, config.hidden_size) == (32, 4096)
    assert config.max_position_embeddings == 2**17
    shape = configured_shape(settings)
    assert (shape.num_heads, shape.num_heads_kv, shape.head_dim) == (32, 8, 128)


def test_preset_may_have_other_layers() -> None:
    settings = ModelSettings(model_preset=Preset.LLAMA_3_8B, model_layers=8)
    assert model_config(settings, max_positions=64).num_hidden_layers == 8


@pytest.mark.parametrize(
    ("model", "given", "rate"),
    [
        (TINY, None, 3e-3),
        (ModelSettings(model_preset=Preset.LLAMA_3_8B), None, 3e-4),
        (ModelSettings(model_config=Path("config.json")), None, 3e-4),
        (ModelSettings(model_preset=Preset.LLAMA_3_8B), 0.01, 0.01),
        (TINY, 0.01, 0.01),
    ],
)
def test_learning_rate_follows_the_model_unless_it_is_given(
    model: ModelSettings, given: float | None, rate: float
) -> None:
    settings = TrainingSettings(learning_rate=given, warmup_steps=0)
    assert chosen(settings, model, torch.device("cpu")).learning_rate_at(0) == rate


@pytest.mark.parametrize(("device", "on_gpu"), [("cpu", False), ("cuda:1", True)])
def test_sharding_and_checkpoints_follow_the_device_unless_they_are_given(
    device: str, on_gpu: bool
) -> None:
    settings = chosen(TrainingSettings(), TINY, torch.device(device))
    assert settings.sharding is (Sharding.FSDP if on_gpu else Sharding.REPLICATED)
    assert settings.activation_checkpointing is on_gpu
    given = TrainingSettings(sharding=Sharding.REPLICATED, activation_checkpointing=False)
    settings = chosen(given, TINY, torch.device(device))
    assert settings.sharding is Sharding.REPLICATED
    assert settings.activation_checkpointing is False


def test_two_models_are_refused() -> None:
    settings = ModelSettings(model_preset=Preset.LLAMA_3_8B, model_config=Path("config.json"))
    with pytest.raises(ModelConfigError, match="both name a model; give one of them"):
        model_config(settings, max_positions=64)


def test_layers_of_no_model_are_refused() -> None:
    with pytest.raises(ValueError, match="model_layers goes with model_preset or model_config"):
        ModelSettings(model_layers=8)


def test_layers_are_found_and_missing_ones_named() -> None:
    config = model_config(TINY, max_positions=64)
    model = build_model(config, attention="sdpa", dtype="float32", seed=0)
    assert [type(layer).__name__ for layer in decoder_layers(model)] == ["LlamaDecoderLayer"] * 2
    model.config.num_hidden_layers = 3
    with pytest.raises(ModelConfigError, match="no list of 3 layers"):
        decoder_layers(model)


def test_compiled_graphs_do_not_name_the_main_module(tmp_path: Path) -> None:
    """They are cached as pickles, which a program with another main module reads as well."""
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing\n"
        "import pickle\n"
        "import torch\n"
        "from torch import nn\n"
        "from distca.apps.train.layers import compile_layers\n"
        "compile_layers([nn.Linear(1, 1)])\n"
        "print(pickle.dumps(torch.contiguous_format))\n"
    )
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=100, check=True
    )
    assert "torch.contiguous_format" in done.stdout
    assert "main__" not in done.stdout


def test_head_that_changes_logits_makes_them_whole(caplog: pytest.LogCaptureFixture) -> None:
    config = model_config(TINY, max_positions=64)
    model = build_model(config, attention="sdpa", dtype="float32", seed=0)
    ids = torch.arange(10)[None]
    chunked = LanguageModel(model, chunk_rows=3)(ids, ids, ids)
    assert not caplog.text
    model.config.logits_scaling = 2.0
    plain_head = has_plain_head(model)
    whole = LanguageModel(model, chunk_rows=3, plain_head=plain_head)(ids, ids, ids)
    assert "more to its logits" in caplog.text
    # The model itself does not know the field, so both are the same loss.
    assert float(whole.detach()) == pytest.approx(float(chunked.detach()), rel=1e-6)


def test_parts_of_layers_are_compiled_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_by_name(function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        assert dynamic, "a batch of another number of rows must not compile again"
        compiled.append(function.__qualname__)
        return lambda *args, **kwargs: function(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", compile_by_name)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    config = model_config(TINY, max_positions=64)
    model = build_model(config, attention="sdpa", dtype="float32", seed=0)
    ids = torch.arange(10)[None]
    before = model(ids).logits
    compile_layers(decoder_layers(model))
    assert sorted(compiled) == [
        "LlamaMLP.forward",
        "LlamaRMSNorm.forward",
        "apply_rotary_pos_emb",
    ]
    assert torch.equal(model(ids).logits, before)


def test_without_a_compiler_nothing_is_compiled_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the trainer's image for CPUs: said at the start, not in the first step."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SettingsError, match=r"--compile-layers is on, and no C\+\+ compiler"):
        compile_layers([nn.Linear(1, 1)])
