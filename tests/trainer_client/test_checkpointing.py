"""Activation checkpoints: everything is recomputed but core attention, in the right nano-batch."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from core_attention.ca_task import Phase
from tests.cluster import Cluster
from tests.trainer_client.test_transformers import (
    CONFIGS,
    make_batches,
    make_model,
    open_session,
    submit,
)
from trainer_client import PingPong, Session, SessionError, checkpoint
from trainer_client.attention_call import AttentionCall
from trainer_client.checkpointing import Region, keep_result, kept_result
from trainer_client.transformers import check_documents


@pytest.fixture(scope="module")
def session(pool_of_four: Cluster) -> Iterator[Session]:
    with open_session(pool_of_four, "checkpointing") as opened:
        yield opened


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[Phase]:
    """How often core attention was sent, by phase."""
    counted: Counter[Phase] = Counter()
    send = AttentionCall._send

    def counting(self: AttentionCall, phase: Phase, *rest: Any) -> None:
        counted[phase] += 1
        send(self, phase, *rest)

    monkeypatch.setattr(AttentionCall, "_send", counting)
    return counted


class CountedForwards:
    """A layer's forward, checkpointed."""

    def __init__(self, layer: nn.Module) -> None:
        self.runs = 0
        self._forward = layer.forward
        layer.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._run, *args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self._forward(*args, **kwargs)


@pytest.mark.parametrize("interleave", [True, False])
def test_layers_run_twice_but_core_attention_once(
    session: Session, calls: Counter[Phase], interleave: bool
) -> None:
    plain = make_model(copy.deepcopy(CONFIGS["Llama"]), "distca")
    model = make_model(copy.deepcopy(CONFIGS["Llama"]), "distca")
    model.load_state_dict(plain.state_dict())
    # Which would run the layers too, at the model's first forward.
    check_documents(model)
    layers = [CountedForwards(layer) for layer in model.get_submodule("model.layers").children()]
    losses = []
    for each in (plain, model):
        calls.clear()
        with session.step(submit(session)):
            loss = sum(o.loss for o in PingPong(each, interleave=interleave)(make_batches()))
            loss.backward()
        losses.append(float(loss.detach()))
        # Two layers of two nano-batches.
        assert calls == {Phase.FORWARD: 4, Phase.BACKWARD: 4}
    assert [layer.runs for layer in layers] == [4, 4]
    assert losses[0] == losses[1]
    for (name, parameter), other in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        # The same operations on the same numbers, but for the plans' float32 sums of dK and dV.
        torch.testing.assert_close(parameter.grad, other[1].grad, rtol=1e-4, atol=1e-6, msg=name)


def test_results_come_back_in_order_and_only_once() -> None:
    region = Region()
    given = [(torch.full((1,), float(i)), torch.full((1,), -float(i))) for i in range(2)]

    def keep() -> None:
        assert kept_result() is None
        for o, lse in given:
            keep_result(o, lse)

    def take() -> list[Any]:
        return [kept_result() for _ in given]

    region.run(keep)
    assert region.run(take) == given
    with pytest.raises(SessionError, match="more often when it is recomputed"):
        region.run(kept_result)


def test_outside_of_a_checkpoint_nothing_is_kept() -> None:
    keep_result(torch.zeros(1), torch.zeros(1))
    assert kept_result() is None
