"""A hybrid stack of Megatron-core that runs on a CPU: its own stack, with layers of its local spec.

What Megatron-core ships as hybrid specs needs TransformerEngine, and Mamba layers mamba-ssm.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


class Recurrence(MegatronModule):
    """Stands for a Mamba layer: a row takes from those before it in its document, less of older
    ones."""

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.mix = torch.nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, hidden_states: torch.Tensor, packed_seq_params: Any = None, **_: Any
    ) -> torch.Tensor:
        lengths = packed_seq_params.cu_seqlens_q.diff()
        document = torch.arange(len(lengths)).repeat_interleave(lengths)
        rows = torch.arange(len(document))
        age = rows[:, None] - rows
        seen = (document[:, None] == document) & (age >= 0)
        weights = torch.where(seen, 0.5 ** age.clamp(min=0).float(), 0.0)
        return hidden_states + torch.einsum("qk,kbh->qbh", weights, self.mix(hidden_states))


def hybrid_spec(experts: int | None) -> ModuleSpec:
    """Of a stack whose pattern says which layers it has: M, *, - or E."""
    local = get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=experts).submodules
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=local.pre_mlp_layernorm, mlp=local.mlp, mlp_bda=local.mlp_bda
    )
    return ModuleSpec(
        module=MambaStack,
        # That norm is TransformerEngine's.
        params={"post_layer_norm": False},
        submodules=MambaStackSubmodules(
            mamba_layer=Recurrence,
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=local.input_layernorm,
                    self_attention=local.self_attention,
                    self_attn_bda=local.self_attn_bda,
                ),
            ),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
            moe_layer=ModuleSpec(module=TransformerLayer, submodules=mlp),
        ),
    )


def hybrid_model(pattern: str, config: Any, spec: ModuleSpec, **arguments: Any) -> MambaModel:
    """With the arguments of ``GPTModel``; one chunk a stage."""
    del arguments["vp_stage"]
    return MambaModel(config, spec, hybrid_override_pattern=pattern, **arguments)
