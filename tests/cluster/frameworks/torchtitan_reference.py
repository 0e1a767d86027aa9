"""An override of torchtitan's VarlenAttention by float64 attention, document by document.

torchtitan's own needs FlashAttention on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.protocols.module import Module

from core_attention.score_rule import PLAIN, ScoreRule
from tests.support.reference import packed_attention

_SIGNATURE = inspect.signature(VarlenAttention.forward)


class ReferenceAttention(VarlenAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        before = config.window_size[0]
        self.rule = PLAIN if before == -1 else ScoreRule(window=before + 1)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        arguments = dict(_SIGNATURE.bind(self, *args, **kwargs).arguments)
        _, query, key, value, *_ = arguments.values()
        lengths = arguments["attention_masks"].cu_seq_q.diff().tolist()
        q, k, v = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (query, key, value))
        o, lse = packed_attention(q, k, v, lengths, arguments.get("scale"), self.rule)
        o = o.to(query.dtype).view(*query.shape[:-1], value.shape[-1])
        transform: Callable[..., torch.Tensor] | None = arguments.get("out_transform")
        return o if transform is None else transform(o, lse.float().view(*query.shape[:-1]))

    forward.__signature__ = _SIGNATURE  # type: ignore[attr-defined]


@override(target=VarlenAttention.Config)
def reference_varlen(config: VarlenAttention.Config) -> ReferenceAttention.Config:
    made: ReferenceAttention.Config = derive(config, ReferenceAttention.Config)
    return made
