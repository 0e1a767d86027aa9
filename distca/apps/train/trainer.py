"""One rank's training: an attached model under DDP or FSDP2, and its optimiser."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

import distca
from distca.apps.train.corpus import VOCABULARY_SIZE
from distca.apps.train.settings import ModelSettings, Sharding
from distca.errors import DistcaError

MAX_GRADIENT_NORM = 1.0
_FEED_FORWARD_MULTIPLE = 32
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def build_model(
    settings: ModelSettings, max_positions: int, *, attention: str, dtype: str, device: torch.device
) -> Any:
    """A Llama of transformers with random weights."""
    # 8/3 of the width, as Llama has it, rounded up.
    feed_forward = -(-8 * settings.hidden_size // (3 * _FEED_FORWARD_MULTIPLE))
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY_SIZE,
        hidden_size=settings.hidden_size,
        intermediate_size=feed_forward * _FEED_FORWARD_MULTIPLE,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        # Bytes are the whole vocabulary: none of them is special.
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    auto: Any = AutoModelForCausalLM  # from_config has no annotations
    with device:
        return auto.from_config(config, attn_implementation=attention, dtype=getattr(torch, dtype))


class Trainer:
    """A model under data-parallel training. All ranks hold equal weights, or a share each.

    Args:
        settings: sizes of the model.
        max_positions: tokens of the longest document.
        sharding: how the weights are kept; sharded ones are float32, and gathered in the dtype of
            the settings, and layers are recomputed.
        device: of this rank.
        options: of :func:`distca.attach`.
    """

    def __init__(
        self,
        settings: ModelSettings,
        max_positions: int,
        sharding: Sharding,
        device: torch.device,
        **options: Any,
    ) -> None:
        shards = sharding is Sharding.FSDP
        dtype = "float32" if shards else settings.dtype.value
        self.model = build_model(
            settings, max_positions, attention="distca", dtype=dtype, device=device
        )
        self.attached = distca.attach(self.model, **options)
        self._parallel: nn.Module
        if shards:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            policy = MixedPrecisionPolicy(
                param_dtype=getattr(torch, settings.dtype), reduce_dtype=torch.float32
            )
            for layer in self.model.model.layers:
                fully_shard(layer, mp_policy=policy)
            self._parallel = fully_shard(self.model, mp_policy=policy)
        else:
            self._parallel = DistributedDataParallel(self.model)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1
        )

    def run(self, batch: dict[str, torch.Tensor], labels: float) -> float:
        """Forward and backward of one step; leaves the gradients of all ranks in the model.

        Args:
            batch: the model's arguments.
            labels: what the rank's loss is divided by: the mean over the ranks, since that is what
                gradients are averaged over.

        Returns:
            This rank's loss.
        """
        self._optimizer.zero_grad()
        loss = self._parallel(**batch, num_items_in_batch=labels).loss
        loss.backward()
        return float(loss.detach())

    def update(self, learning_rate: float) -> float:
        """Clips the gradients and updates the weights; returns the norm before clipping.

        Raises:
            DistcaError: the norm is not finite, so the weights would be lost.
        """
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        found = float(_whole(norm))
        if not math.isfinite(found):
            raise DistcaError(f"the gradients' norm is {found}; lower --learning-rate")
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        return found

    def weights(self) -> dict[str, Any]:
        """The state dict of the whole model, on every rank. All ranks call it."""
        return {name: _whole(tensor) for name, tensor in self.model.state_dict().items()}

    def gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The gradients of all parameters, gathered one by one. All ranks call it."""
        for name, parameter in self.model.named_parameters():
            yield name, None if parameter.grad is None else _whole(parameter.grad)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Whole state dicts of model and optimiser, by names, for the first rank to save. All ranks
        call it; what is gathered of a sharded model is empty on the others."""
        gathered: tuple[dict[str, Any], dict[str, Any]] = get_state_dict(
            self.model, self._optimizer, options=_WHOLE
        )
        return gathered

    def load_state(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Takes up what :meth:`state` gave the first rank, of this run or of one whose weights were
        spread otherwise."""
        set_state_dict(
            self.model,
            self._optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=_WHOLE,
        )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, gathered from all ranks if it is sharded; then all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
