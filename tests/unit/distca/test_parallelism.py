"""How the ranks of ``distca train`` are divided, and which plans of models are taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import trainer_client.models.transformers  # noqa: F401  (registers the attention)
from core_attention.shape import AttentionShape
from distca.errors import ModelConfigError, SettingsError
from distca.shapes import local_shape
from distca.train.model import build_model, model_config
from distca.train.parallelism import Parallelism
from distca.train.settings import ModelSettings, TrainingSettings
from distca.train.sharding import clip_gradients, squared_norm
from distca.train.tensor_parallel import TensorParallel, check_plan

TINY = ModelSettings(hidden_size=32, layers=2, heads=4, kv_heads=2)
SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=8, dtype="float32")


def test_ranks_are_replicas_of_stages_of_shares() -> None:
    settings = TrainingSettings(pipeline_stages=2, tensor_parallel=2)
    found = Parallelism.of(settings, 8)
    assert (found.n_replicas, found.copies) == (2, 4)
    assert [found.replica(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [found.pipeline_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [list(found.group(rank)) for rank in (0, 3, 6)] == [[0, 1], [2, 3], [6, 7]]
    assert list(Parallelism.of(TrainingSettings(), 3).group(1)) == []


def test_ranks_that_cannot_be_divided_are_named() -> None:
    settings = TrainingSettings(pipeline_stages=2, tensor_parallel=2)
    told = "--pipeline-stages is 2 and --tensor-parallel is 2 and there are 6 ranks; .* of 4"
    with pytest.raises(SettingsError, match=told):
        Parallelism.of(settings, 6)


def test_layers_that_are_shared_are_not_compiled() -> None:
    with pytest.raises(SettingsError, match="--compile-layers with --tensor-parallel 2"):
        Parallelism.of(TrainingSettings(tensor_parallel=2, compile_layers=True), 2)


def test_heads_are_shared_evenly() -> None:
    assert local_shape(SHAPE, 1) == SHAPE
    shared = local_shape(SHAPE, 2)
    assert (shared.num_heads, shared.num_heads_kv) == (2, 1)
    with pytest.raises(SettingsError, match="--tensor-parallel is 4, and num_heads_kv is 2"):
        local_shape(SHAPE, 4)
    with pytest.raises(SettingsError, match="--tensor-parallel is 3, and num_heads is 4"):
        local_shape(SHAPE, 3)


def test_plans_that_are_not_taken_are_named() -> None:
    mixtral, gpt2 = transformers.MixtralConfig(), transformers.GPT2Config()
    check_plan(gpt2, 1)
    with pytest.raises(ModelConfigError, match=r"'gpt2' .* no base_model_tp_plan"):
        check_plan(gpt2, 2)
    with pytest.raises(ModelConfigError, match=r"'mixtral' .*experts.* is "):
        check_plan(mixtral, 2)
    check_plan(transformers.Qwen3Config(), 2)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/alone", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
    dist.destroy_process_group()


def test_a_plan_that_mixes_heads_up_is_found_out(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank a share is the whole, unless something else is wrong."""
    config = model_config(TINY, max_positions=16)
    TensorParallel(whole(config), alone)
    model = whole(config)

    def shared(module: Any, *_: Any, **__: Any) -> Any:
        module.weight.data.mul_(1.1)
        return module

    monkeypatch.setattr("distca.train.tensor_parallel.parallelize_module", shared)
    with pytest.raises(ModelConfigError, match=r"'llama' .* it gives other hidden states"):
        TensorParallel(model, alone)


def whole(config: Any) -> Any:
    return build_model(config, attention="distca", dtype="float32", seed=1)


def test_gradients_are_clipped_as_pytorch_clips_them() -> None:
    ours, theirs = (nn.Linear(3, 4) for _ in range(2))
    for module in (ours, theirs):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
    norm = squared_norm(ours.parameters()) ** 0.5
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), 1.5)
    clip_gradients(ours.parameters(), norm, 1.5)
    assert norm == pytest.approx(float(expected))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert squared_norm([nn.Parameter(torch.zeros(2))]) == 0.0
