"""Models on a GPU: autograd runs on a thread of its own, and the device draws random numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from core_attention.shape import AttentionShape
from tests.cluster.trainer_client.test_checkpointing import CHECKPOINTED, Checkpointed, gpt2_config
from tests.cluster.trainer_client.test_gpu_parity import DEVICE, ON_GPU, gpu_pool
from tests.cluster.trainer_client.test_transformers import (
    make_batches,
    make_model,
    open_session,
    submit,
)
from tests.support.cluster import Cluster
from tests.support.loops import PingPong
from trainer_client import Session

__all__ = ["gpu_pool"]

pytestmark = ON_GPU

SHAPE = AttentionShape(num_heads=4, num_heads_kv=4, head_dim=64, head_dim_v=64, dtype="bfloat16")
CONFIG = gpt2_config(256)


@pytest.fixture(scope="module", params=["in-place", "pool"])
def session(request: pytest.FixtureRequest, gpu_pool: Cluster) -> Iterator[Session]:
    with open_session(
        gpu_pool,
        f"gpu-models-{request.param}",
        shape=SHAPE,
        placement=request.param,
        device=DEVICE,
        tick_timeout_seconds=120.0,
    ) as opened:
        yield opened


def model_on_gpu() -> Any:
    return make_model(copy.deepcopy(CONFIG), "distca").to(DEVICE, torch.bfloat16).train()


def batches() -> list[dict[str, torch.Tensor]]:
    return [{name: t.to(DEVICE) for name, t in batch.items()} for batch in make_batches()]


def train(session: Session, model: nn.Module, seed: int = 7) -> float:
    torch.manual_seed(seed)
    with session.step(submit(session)):
        loss = sum(output.loss for output in PingPong(model)(batches()))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("checkpointed", CHECKPOINTED.values(), ids=list(CHECKPOINTED))
def test_gradients_of_checkpoints_with_dropout_are_those_without_checkpoints(
    session: Session, checkpointed: Checkpointed
) -> None:
    plain, model = model_on_gpu(), model_on_gpu()
    model.load_state_dict(plain.state_dict())
    checkpointed(model)
    assert train(session, plain) == train(session, model)
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        off = (parameter.grad - other.grad).float().norm() / other.grad.float().norm()
        # dQ is summed in any order on a GPU, and rounded to bfloat16, 4e-3, in two layers; other
        # masks put gradients off by more than a half.
        assert off < 2e-2, f"{name} is off by {off:.1e}"


def test_a_step_without_dropout_leaves_the_generators_alone(session: Session) -> None:
    model = model_on_gpu().eval()
    train(session, model)
    torch.manual_seed(7)
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    train(session, model)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])
