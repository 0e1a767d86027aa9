"""Models as their users change them: prompts before the rows, and quantised weights."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn

from tests.cluster.trainer_client.test_transformers import (
    CONFIGS,
    make_model,
)
from tests.support.model_options import options_for
from trainer_client import SessionError
from trainer_client.models.document_check import check_documents


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
