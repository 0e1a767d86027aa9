"""The model, its sharding and its optimiser: the same for every way of spreading core attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.gpu.training.batches import TokenBatch
from benchmarks.gpu.training.layers import (
    LanguageModel,
    checkpoint_layers,
    compile_layers,
    shard_model,
)
from core_attention.shape import AttentionShape
from trainer_client import in_nano_batch
from trainer_client.models.transformers import IMPLEMENTATION, check_documents
from trainer_client.step.lane import require_step
from trainer_client.step.ping_pong import Call, run_in_turns


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a Llama; the defaults are Llama-3-8B's but for the depth."""

    layers: int
    hidden: int = 4096
    feed_forward: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    dtype: str = "bfloat16"

    @classmethod
    def tiny(cls, layers: int, device: str, vocabulary: int = 512) -> ModelShape:
        """To try a program: in float32 on a CPU."""
        return cls(
            layers=layers, hidden=64, feed_forward=96, heads=4, kv_heads=2, vocabulary=vocabulary,
            dtype="float32" if device == "cpu" else "bfloat16",
        )  # fmt: skip

    @property
    def attention(self) -> AttentionShape:
        """Of its core attention."""
        head_dim = self.hidden // self.heads
        return AttentionShape(
            num_heads=self.heads,
            num_heads_kv=self.kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim,
            dtype=self.dtype,
        )

    @property
    def matrix_weights(self) -> int:
        """Weights that every token is multiplied by, the output head included."""
        head_dim = self.hidden // self.heads
        attention = self.hidden * head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.feed_forward
        return self.layers * layer + self.hidden * self.vocabulary

    def step_flops(self, tokens: int, qk_pairs: int) -> float:
        """Operations of forward and backward of one step, recomputation not counted."""
        attention = self.attention.qk_flops(qk_pairs, False) + self.attention.qk_flops(
            qk_pairs, True
        )
        # The backward pass of attention is counted without the scores that kernels compute again.
        return 6.0 * self.matrix_weights * tokens + self.layers * attention * 6 / 7

    def config(self, max_positions: int) -> LlamaConfig:
        """For transformers."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.feed_forward,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            tie_word_embeddings=False,
            use_cache=False,
        )


class TrainingStack:
    """A model with random weights, sharded over all ranks, layers recomputed but for core
    attention.

    Args:
        shape: of the model.
        attention: name of the attention implementation.
        n_lanes: nano-batches of a step; they take turns.
        interleave: False runs them one after the other.
        max_positions: longest document.
        compiled: whether parts of the layers are compiled.
        learning_rate: of AdamW.
        device: of this rank.
        n_ranks: all ranks.
    """

    def __init__(
        self,
        shape: ModelShape,
        attention: str,
        *,
        n_lanes: int,
        interleave: bool = True,
        max_positions: int,
        compiled: bool,
        learning_rate: float,
        device: torch.device,
        n_ranks: int,
    ) -> None:
        self._n_ranks = n_ranks
        torch.manual_seed(0)
        auto: Any = AutoModelForCausalLM
        with device:
            model = auto.from_config(
                shape.config(max_positions), attn_implementation=attention, dtype=torch.float32
            )
        model.train()
        if attention == IMPLEMENTATION:
            # While its weights are whole.
            check_documents(model)
        layers = list(model.model.layers)
        if compiled:
            compile_layers(layers)
        checkpoint_layers(layers)
        language = LanguageModel(model)
        root = NanoBatches(language, interleave=interleave) if n_lanes > 1 else InTurn(language)
        self._sharded = shard_model(
            root,
            layers,
            n_ranks=n_ranks,
            device=device,
            compute_dtype=getattr(torch, shape.dtype),
        )
        self._parameters = list(root.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=learning_rate, fused=device.type == "cuda"
        )

    def forward_backward(self, batches: Sequence[TokenBatch], predicted: int) -> torch.Tensor:
        """Runs one step up to its gradients; returns this rank's part of the mean loss.

        Args:
            batches: this rank's nano-batches.
            predicted: tokens that all ranks predict.
        """
        self._optimizer.zero_grad(set_to_none=True)
        losses = self._sharded([vars(batch) for batch in batches])
        loss = torch.stack(losses).sum() / predicted
        # FSDP averages over the ranks, but each has only its own share of the sum.
        (loss * self._n_ranks).backward()
        return loss.detach()

    def update(self) -> None:
        """Clips the gradients and updates the weights."""
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()


class NanoBatches(nn.Module):
    """Runs the nano-batches of a session's step, in turns or one after the other."""

    def __init__(self, module: nn.Module, *, interleave: bool) -> None:
        super().__init__()
        self.module, self._interleave = module, interleave

    def forward(self, nano_batches: Sequence[Mapping[str, Any]]) -> list[Any]:
        if self._interleave:
            calls: list[Call] = [((), batch) for batch in nano_batches]
            return run_in_turns(self.module, calls, 0)
        outputs = []
        for index, batch in enumerate(nano_batches):
            with in_nano_batch(index):
                outputs.append(self.module(**batch))
            require_step().lane_returned(index)
        return outputs


class InTurn(nn.Module):
    """Runs the nano-batches without a session."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, nano_batches: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [self.module(**batch) for batch in nano_batches]
