"""The core attention of a Megatron-core layer, served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import nn

from core_attention.host_copies import on_host
from core_attention.shape import AttentionShape
from trainer_client.errors import SessionError
from trainer_client.frameworks.megatron.refusals import layer_problems, problems
from trainer_client.frameworks.megatron.rng_fork import outside_fork
from trainer_client.frameworks.versions import UnsupportedSetting, refuse
from trainer_client.hooks.checkpointing import Checkpoints
from trainer_client.hooks.compile_boundary import outside_graphs
from trainer_client.hooks.pipelining_dry_run import is_shape_inference
from trainer_client.local_attention.plain import attend_documents
from trainer_client.models.documents import Documents, documents_of
from trainer_client.step.lane import current_step, require_lane
from trainer_client.step.operation import core_attention

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)

_KEPT = ("input_layernorm_checkpoint", "qkv_up_checkpoint")
"""Attributes that a layer or its attention sets on itself before core attention, and uses after it:
of ``recompute_modules`` layernorm and mla_up_proj."""


class ServedCoreAttention(MegatronModule):
    """Takes the place of ``DotProductAttention`` and ``TEDotProductAttention`` in a layer spec.

    Args:
        config: of the transformer.
        layer_number: from 1.
        attn_mask_type: causal.
        attention_type: ``"self"``.
        attention_dropout: 0, or None if that of the config is.
        softmax_scale: multiplies q.k; None is 1 / sqrt(head dim).
        cp_comm_type: of context parallelism, which is not used.
        pg_collection: holds the tensor-parallel group; None: Megatron's global one.
        k_channels, v_channels: head dims, with multi-head latent attention.

    Attributes:
        shape: heads of this rank, head dims and dtype.
        softmax_scale: what multiplies q.k.
        around: the modules that this one is part of, if halves of a microbatch take turns.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.around: tuple[nn.Module, ...] = ()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        refuse(
            (
                *problems(config),
                *layer_problems(config, layer_number, attention_type, dropout),
                *([] if attn_mask_type in _CAUSAL else [f"a layer's mask is {attn_mask_type}"]),
            ),
            "Megatron-core",
        )
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        tp = pg_collection.tp.size()
        head_dim = k_channels or config.kv_channels
        # With multi-head latent attention every head has keys of its own, whatever the groups.
        is_latent = getattr(config, "multi_latent_attention", False)
        heads_kv = config.num_attention_heads if is_latent else config.num_query_groups
        self.shape = AttentionShape(
            num_heads=config.num_attention_heads // tp,
            num_heads_kv=heads_kv // tp,
            head_dim=head_dim,
            head_dim_v=v_channels or head_dim,
            dtype=str(config.params_dtype).removeprefix("torch."),
        )
        self.softmax_scale = (
            self.shape.default_softmax_scale if softmax_scale is None else softmax_scale
        )

    @outside_graphs
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Core attention of one layer.

        Args:
            query: ``[t, heads, head_dim]`` with packed documents, else ``[s, b, heads, head_dim]``:
                b documents of s tokens.
            key, value: likewise, with the key heads of this rank.
            attention_mask: not looked at: the documents are those of the manifest.
            attn_mask_type: causal, or None.
            attention_bias: None.
            packed_seq_params: Megatron's, in the format ``thd``; None: documents are not packed.

        Returns:
            ``[t, heads, head_dim_v]``, or ``[s, b, heads * head_dim_v]``.
        """
        if attention_bias is not None:
            raise UnsupportedSetting("attention_bias is given; served core attention has none")
        if attn_mask_type is not None and attn_mask_type not in _CAUSAL:
            raise UnsupportedSetting(f"a layer's mask is {attn_mask_type}; causal alone is served")
        if is_shape_inference(Checkpoints().recomputed):
            if packed_seq_params is None:
                return _unpacked(core_attention, query, key, value)
            return core_attention(query.contiguous(), key.contiguous(), value.contiguous())
        if current_step.get() is None and not torch._C._current_graph_task_id() >= 0:
            return self._at_home(query, key, value, packed_seq_params)
        documents = documents_of(require_lane())
        if packed_seq_params is not None:
            check_packed(packed_seq_params, documents)
            with self._layers_kept():
                return core_attention(query.contiguous(), key.contiguous(), value.contiguous())
        length, n_documents = query.shape[:2]
        if documents.lengths != [length] * n_documents:
            raise ValueError(
                f"{documents.where}: {n_documents} documents of {length} tokens were given, and "
                f"lengths {documents.lengths[:8]}... planned; hand packed_seq_params to the model "
                "on every stage"
            )
        with self._layers_kept():
            return _unpacked(core_attention, query, key, value)

    @contextmanager
    def _layers_kept(self) -> Iterator[None]:
        """After the block, in which the other half of the microbatch may have its turn, the modules
        around have what they had before it, and so has Megatron's tracker of random states."""
        if not self.around:
            yield
            return
        kept = [
            (module, name, vars(module)[name])
            for module in self.around
            for name in _KEPT
            if name in vars(module)
        ]
        with outside_fork():
            yield
        for module, name, value in kept:
            setattr(module, name, value)

    def _at_home(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Any
    ) -> torch.Tensor:
        """Outside of a step: validation."""
        if torch.is_grad_enabled():
            raise SessionError(
                "core attention is called outside of a step; call forward_backward_func inside "
                "'with steps.step(number):' with steps.numbered(forward_step), or validate under "
                "torch.no_grad()"
            )
        if packed is None:
            lengths = [len(query)] * query.shape[1]
        else:
            check_packed(packed)
            lengths = on_host(packed.cu_seqlens_q).diff().tolist()

        def attend(*rows: torch.Tensor) -> torch.Tensor:
            q, k, v = (tensor.transpose(0, 1) for tensor in rows)
            return attend_documents(q, k, v, lengths, scale=self.softmax_scale).transpose(0, 1)

        if packed is None:
            return _unpacked(attend, query, key, value)
        return attend(query, key, value).contiguous()


def _unpacked(attend: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """``attend`` of packed rows, for b documents of s tokens.

    Args:
        attend: of q, k and v ``[rows, heads, head_dim]``.
        tensors: q, k and v ``[s, b, heads, head_dim]``.

    Returns:
        o ``[s, b, heads * head_dim_v]``.
    """
    length, n_documents = tensors[0].shape[:2]
    o = attend(*(tensor.transpose(0, 1).flatten(0, 1).contiguous() for tensor in tensors))
    return o.reshape(n_documents, length, -1).transpose(0, 1).contiguous()


def check_packed(packed: Any, documents: Documents | None = None) -> None:
    """Checks Megatron's ``PackedSeqParams``, and compares them with the manifest if there is
    one."""
    if packed.qkv_format != "thd":
        raise UnsupportedSetting(
            f"packed_seq_params.qkv_format is {packed.qkv_format!r}; it must be 'thd'"
        )
    for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        bounds, true = getattr(packed, name), getattr(packed, name.removesuffix("_padded"))
        # The same object needs no comparison, for which the thread would wait for the GPU.
        if bounds is not None and bounds is not true and not torch.equal(bounds, true):
            raise UnsupportedSetting(
                f"packed_seq_params.{name} differ from those without padding; pack documents "
                "without padding between them, which no kernel of DistCA needs"
            )
    if getattr(packed, "local_cp_size", None) not in (None, 1):
        raise UnsupportedSetting(
            f"packed_seq_params.local_cp_size is {packed.local_cp_size}: hybrid context "
            "parallelism cannot run with served core attention, which spreads documents itself"
        )
    if documents is not None:
        documents.check(
            {"cu_seq_lens_q": packed.cu_seqlens_q, "cu_seq_lens_k": packed.cu_seqlens_kv}
        )
