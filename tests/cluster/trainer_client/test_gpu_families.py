"""Model families of transformers on a GPU: kernels with windows, softcaps, sinks, both masks and
all head dims, called as models call them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tests.cluster.trainer_client.family_runs import distance, gradients_of
from tests.cluster.trainer_client.model_sweep import (
    WINDOWS,
    documented,
    loss_of,
    make_model,
    planned_step,
    run_alone,
    run_packed,
    served_families,
)
from tests.cluster.trainer_client.test_model_families import INSTALLED, TRIED
from tests.support.tiny_models import tiny_config
from trainer_client.models.document_check import UnsupportedArgument, UnsupportedModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(400),
]

LENGTHS = [9, 1, 14, 5, 6, 7, 100]
"""Windows of tiny models have six keys."""
DEVICE = torch.device("cuda", 0)

LATENT: dict[str, Any] = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 192,
    "v_head_dim": 128,
    "head_dim": 64,
}
"""Head dims of DeepSeek's attention, the ones for which there is a kernel."""


ALL_EXPERTS: dict[str, dict[str, Any]] = {"flex_olmo": {"num_experts_per_tok": 4}}
"""Families whose router is so undecided that a rounding chooses other experts, which moves
gradients by up to a tenth: with their own attention, too, on other tokens."""


def on_device(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    moved: PreTrainedModel = model.to(DEVICE, dtype)  # type: ignore[arg-type]
    return moved


def config_for_kernels(family: str) -> PreTrainedConfig:
    """Tiny, with head dims that kernels have."""
    wide_windows = documented()[family].kind == WINDOWS
    fields = ALL_EXPERTS.get(family, {})
    config = tiny_config(family, wide_windows=wide_windows, wider=4, **fields)
    if not getattr(config, "qk_rope_head_dim", None):
        return config
    fields = fields | {name: dim for name, dim in LATENT.items() if hasattr(config, name)}
    return tiny_config(family, wider=4, **fields)


def skip_elsewhere(family: str) -> None:
    if family == "moshi" and INSTALLED < TRIED:
        pytest.skip("its own eager attention is not causal where no mask is given")


@pytest.mark.parametrize("family", served_families())
def test_a_family_is_as_near_to_float32_as_its_own_attention(family: str) -> None:
    """bfloat16 rounds activations of both by 2^-9, in another order; what a family makes of that
    is the measure. Where it chooses experts, a rounding may choose another one for one side alone:
    up to four times as much was seen. A wrong mask or head is off by a hundred times as much."""
    skip_elsewhere(family)
    config = config_for_kernels(family)
    try:
        model = on_device(make_model(config, "distca"), torch.bfloat16)
    except Exception as error:
        if INSTALLED < TRIED:
            pytest.skip(f"transformers {INSTALLED} does not build it: {error}")
        raise
    own = on_device(make_model(config, "eager"), torch.bfloat16)
    exact = on_device(make_model(config, "eager"), torch.float32)
    own.load_state_dict(model.state_dict())
    exact.load_state_dict(model.state_dict())
    try:
        step = planned_step(model, LENGTHS)
        logits = run_packed(model, step)
    except (UnsupportedModel, UnsupportedArgument) as error:
        if INSTALLED < TRIED:
            pytest.skip(f"refused in transformers {INSTALLED}: {error}")
        raise
    losses = [
        loss_of(rows, LENGTHS)
        for rows in (logits, run_alone(own, LENGTHS), run_alone(exact, LENGTHS))
    ]
    for loss in losses:
        loss.backward()
    assert step.calls > 0
    ours, theirs = (distance(gradients_of(each), gradients_of(exact)) for each in (model, own))
    assert ours <= 5.0 * theirs + 1e-3, f"{ours:.2e}, with its own attention {theirs:.2e}"
    mine, others, right = (float(loss.detach()) for loss in losses)
    assert abs(mine - right) <= 5.0 * abs(others - right) + 1e-3 * abs(right)
