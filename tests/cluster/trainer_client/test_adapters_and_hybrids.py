"""Models as their users change them: adapters on frozen weights, and layers of several kinds."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

from core_attention.manifest import RankManifest
from tests.cluster.trainer_client.test_transformers import (
    CONFIGS,
    LENGTHS,
    make_batches,
    make_model,
)
from tests.support.cluster import Cluster, on_this_host
from tests.support.loops import PingPong
from tests.support.model_options import options_for
from trainer_client import Placement, Session, SessionError, SessionOptions
from trainer_client.models.document_check import check_documents

SOON_SECONDS = 10.0
"""Far below every deadline; a step takes a fraction of a second."""


class Adapter(nn.Module):
    """A frozen matrix and a small one beside it, behind dropout, as LoRA has them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base(x) + self.up(self.down(self.dropout(x)))
        return adapted


def adapt_queries(layer: Any) -> None:
    layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)


def adapt_feed_forward(layer: Any) -> None:
    """Below the first adapter nothing needs gradients: core attention of layer 0 included."""
    layer.mlp.up_proj = Adapter(layer.mlp.up_proj)


def adapted_model(adapt: Callable[[Any], None], *, checkpointed: bool) -> Any:
    model: Any = make_model(copy.deepcopy(CONFIGS["Llama"]), "distca")
    model.requires_grad_(False)
    for layer in model.model.layers:
        adapt(layer)
    if checkpointed:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return model.train()


def options_of(model: nn.Module, cluster: Cluster, job: str) -> SessionOptions:
    return options_for(
        model,
        control_plane=cluster.address,
        job=job,
        rank=0,
        n_ranks=1,
        placement=Placement.IN_PLACE,
        **on_this_host(cluster.folder),
    )


@pytest.mark.parametrize("adapt", [adapt_queries, adapt_feed_forward])
def test_adapters_with_dropout_train_alike_with_and_without_checkpoints(
    pool_of_four: Cluster, adapt: Callable[[Any], None]
) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = adapted_model(adapt, checkpointed=checkpointed)
        options = options_of(model, pool_of_four, f"{adapt.__name__}-{checkpointed}")
        with Session.open(options) as session:
            for step in range(2):
                session.submit(RankManifest.from_lengths(step, 0, LENGTHS))
                torch.manual_seed(5)
                began = time.monotonic()
                with session.step(step):
                    sum(output.loss for output in PingPong(model)(make_batches())).backward()
                assert time.monotonic() - began < SOON_SECONDS
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    plain, recomputed = gradients
    assert plain
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        # The same masks; sums of dK and dV may be in another order, in float32.
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "name", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"]
)
def test_prompts_before_the_rows_are_refused(name: str) -> None:
    model: Any = make_model(copy.deepcopy(CONFIGS["Llama"]), "distca")
    config = getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    prompted: Any = peft.get_peft_model(model, config)
    with pytest.raises(SessionError):
        options_for(prompted, control_plane="x:1", job="x", rank=0, n_ranks=1)


class Quantised(torch.Tensor):
    """A weight of 8 bits with one scale, as torchao has them: of all operations it knows the
    linear layer's."""

    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(
            cls, integers.shape, dtype=scale.dtype
        )
        return made

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor) -> None:
        self.integers, self.scale = integers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Quantised:
        return Quantised(**inner)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, *bias = args
            return func(x, weight.integers * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].integers, args[0].scale)
        raise NotImplementedError(f"{func} of a quantised weight")


def test_a_model_with_quantised_weights_is_checked() -> None:
    model: Any = make_model(copy.deepcopy(CONFIGS["Llama"]), "distca")
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.mlp.down_proj):
            scale = projection.weight.detach().abs().max() / 127
            integers = (projection.weight.detach() / scale).round().to(torch.int8)
            quantised = Quantised(integers, scale)
            projection.weight = nn.Parameter(quantised, requires_grad=False)
    found = check_documents(model)
    assert not found.fault
    assert len(found.calls) == len(model.model.layers)
