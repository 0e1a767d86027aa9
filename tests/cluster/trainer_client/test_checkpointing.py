"""Activation checkpoints: everything is recomputed but core attention, in the right nano-batch."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from core_attention.ca_task import Phase
from tests.cluster.trainer_client.test_transformers import (
    CONFIGS,
    SHAPE,
    make_batches,
    make_model,
    open_session,
    submit,
)
from tests.support.cluster import Cluster
from tests.support.gradients import assert_gradients
from tests.support.loops import PingPong
from trainer_client import Session, SessionError, checkpoint
from trainer_client.errors import ChangedInPlace
from trainer_client.hooks import checkpointing
from trainer_client.hooks.checkpointing import CheckpointedCall, Checkpoints
from trainer_client.models.transformers import check_documents
from trainer_client.step.attention_call import AttentionCall


def gpt2_config(width: int) -> transformers.GPT2Config:
    """A small model with dropout everywhere but in attention."""
    return transformers.GPT2Config(
        vocab_size=64,
        n_positions=512,
        n_embd=width,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.0,
        use_cache=False,
    )


GPT2 = gpt2_config(64)

TOLERANCE = 1e-4
"""The same operations on the same numbers, but for the plans' float32 sums of dK and dV."""

Checkpointed = Callable[[Any], None]


def _by_layer(model: Any, wrap: Callable[..., Any]) -> None:
    for layer in model.transformer.h:
        layer.forward = functools.partial(wrap, layer.forward)


CHECKPOINTED: dict[str, Checkpointed] = {
    "transformers' own": lambda model: model.gradient_checkpointing_enable(),
    "torch": lambda model: _by_layer(
        model, functools.partial(torch_checkpoint, use_reentrant=False)
    ),
    "distca": lambda model: _by_layer(model, checkpoint),
}
"""How users ask for checkpoints."""


@pytest.fixture(scope="module")
def session(pool_of_four: Cluster) -> Iterator[Session]:
    with open_session(pool_of_four, "checkpointing") as opened:
        yield opened


@pytest.fixture(scope="module")
def gpt2_session(pool_of_four: Cluster) -> Iterator[Session]:
    """Of a shape with as many key heads as query heads."""
    shape = replace(SHAPE, num_heads_kv=SHAPE.num_heads)
    with open_session(pool_of_four, "checkpointing-gpt2", shape=shape) as opened:
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
    assert_gradients(model, plain, TOLERANCE)


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("checkpointed", CHECKPOINTED.values(), ids=list(CHECKPOINTED))
def test_gradients_of_checkpoints_with_dropout_are_those_without_checkpoints(
    gpt2_session: Session, checkpointed: Checkpointed, interleave: bool
) -> None:
    """A recomputation that replays other random numbers changes no loss, but every gradient."""
    plain, model = (
        make_model(copy.deepcopy(GPT2), "distca"),
        make_model(copy.deepcopy(GPT2), "distca"),
    )
    model.load_state_dict(plain.state_dict())
    checkpointed(model)
    losses, numbers = [], []
    for each in (plain.train(), model.train()):
        torch.manual_seed(7)
        with gpt2_session.step(submit(gpt2_session)):
            loss = sum(o.loss for o in PingPong(each, interleave=interleave)(make_batches()))
            loss.backward()
        losses.append(float(loss.detach()))
        numbers.append(float(torch.rand(())))
    assert losses[0] == losses[1]
    assert numbers[0] == numbers[1]
    assert_gradients(model, plain, TOLERANCE)


def test_several_calls_in_one_checkpoint(session: Session) -> None:
    plain = make_model(copy.deepcopy(CONFIGS["Llama"]), "distca")
    model = make_model(copy.deepcopy(CONFIGS["Llama"]), "distca")
    model.load_state_dict(plain.state_dict())
    whole = model.get_submodule("model")
    forward = whole.forward

    def twice_checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(checkpoint, forward, *args, **kwargs)

    whole.forward = twice_checkpointed
    for each in (plain, model):
        with session.step(submit(session)):
            sum(output.loss for output in PingPong(each)(make_batches())).backward()
    assert_gradients(model, plain, TOLERANCE)


def test_checkpoints_in_evaluation_keep_nothing(session: Session) -> None:
    model = make_model(copy.deepcopy(CONFIGS["Llama"]), "distca").train()
    CHECKPOINTED["transformers' own"](model)
    gc.collect()
    before = len(checkpointing._regions)
    with session.step(submit(session)), torch.no_grad():
        PingPong(model)(make_batches())
    gc.collect()
    assert len(checkpointing._regions) == before


def test_a_reentrant_checkpoint_is_named(session: Session) -> None:
    model: Any = make_model(copy.deepcopy(CONFIGS["Llama"]), "distca").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(SessionError), session.step(submit(session)):
        sum(output.loss for output in PingPong(model)(make_batches())).backward()


def test_results_come_back_in_order_only_once_and_unchanged() -> None:
    region = CheckpointedCall()
    given = [(torch.full((1,), float(i)), torch.full((1,), -float(i))) for i in range(2)]
    for lane, result in enumerate(given):
        region.keep(lane, *result)
    for lane, result in enumerate(given):
        assert region.caller == lane
        assert region.take() == result
    with pytest.raises(SessionError):
        region.take()
    for changed in given[0]:
        region.keep(None, *given[0])
        changed.add_(1.0)
        with pytest.raises(ChangedInPlace):
            region.take()
        region = CheckpointedCall()
    # Of a frozen tower inside a checkpointed part; such tensors count no writes.
    with torch.inference_mode():
        region.keep(None, torch.ones(1), torch.zeros(1))
    assert region.take() == (torch.ones(1), torch.zeros(1))
    outside = Checkpoints()
    outside.keep(None, torch.zeros(1), torch.zeros(1))
    assert outside.recomputed is None


def test_output_that_is_changed_in_place_is_named(session: Session) -> None:
    """The recomputation would change it once more, and gradients would be wrong without a word."""
    model: Any = make_model(copy.deepcopy(CONFIGS["Llama"]), "distca").train()
    CHECKPOINTED["transformers' own"](model)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, rows: (rows[0].mul_(0.5),))
    with (
        pytest.raises(ChangedInPlace) as raised,
        session.step(submit(session)),
    ):
        sum(output.loss for output in PingPong(model)(make_batches())).backward()
    assert raised.value.names == ("o",)


def test_steps_that_end_in_other_threads_take_nothing_of_a_checkpoint() -> None:
    """The ranks of a job may be threads of one process."""
    result = torch.ones(1), torch.zeros(1)
    over = threading.Event()

    def end_steps() -> None:
        while not over.is_set():
            checkpointing.forget_step(object())

    def layer(x: torch.Tensor) -> torch.Tensor:
        checkpoints = Checkpoints()
        if checkpoints.recomputed:
            o, _ = checkpoints.recomputed.take()
        else:
            o = result[0]
            checkpoints.keep("a lane", *result)
        return torch.sin(x * o)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as other:
            ended = other.submit(end_steps)
            try:
                for _ in range(200):
                    x = torch.ones(1, requires_grad=True)
                    losses = [checkpoint(layer, x) for _ in range(8)]
                    torch.stack(losses).sum().backward()
            finally:
                over.set()
            ended.result(30)
    finally:
        sys.setswitchinterval(interval)
