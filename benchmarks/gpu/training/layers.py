"""A Llama together with its loss, and what is hung on its layers: checkpoints, compiled parts,
shards."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu.training.loss import chunked_loss
from trainer_client import checkpoint
from trainer_client.step.fsdp import prepare_turns

_ROTARY = "apply_rotary_pos_emb"


class LanguageModel(nn.Module):
    """A causal language model of transformers whose forward returns the summed loss, so that its
    logits are never whole."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Sum of the cross entropy over labels that are not IGNORED_LABEL, a float32 scalar.

        Args:
            input_ids, position_ids, labels: ``[1, n_tokens]``; labels are the next tokens already.
        """
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        hidden = self.model.base_model(**inputs).last_hidden_state
        return chunked_loss(hidden[0], self.model.lm_head.weight, labels[0])


def checkpoint_layers(layers: list[nn.Module]) -> None:
    """Has every layer recomputed in the backward pass, but for core attention.

    The layer's ``forward`` is wrapped, not its call: hooks run once, outside.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward)


def compile_layers(layers: list[nn.Module]) -> None:
    """Compiles what lies between the matrix products and core attention: normalisation, rotary
    embeddings and the feed-forward part, each once for all layers and any number of rows.

    Rotary embeddings are a function of the model's module in transformers, and are compiled for
    every model of that type in the process.
    """
    _let_others_read_the_cache()
    compiled: dict[Any, Callable[..., Any]] = {}
    for layer in layers:
        for part in layer.modules():
            name = type(part).__name__
            if name.endswith(("RMSNorm", "MLP")):
                function = type(part).forward
                if function not in compiled:
                    compiled[function] = torch.compile(function, dynamic=True)
                part.forward = MethodType(compiled[function], part)
    source = sys.modules[type(layers[0]).__module__]
    rotate = getattr(source, _ROTARY)
    if not hasattr(rotate, "_torchdynamo_orig_callable"):
        setattr(source, _ROTARY, torch.compile(rotate, dynamic=True))


def _let_others_read_the_cache() -> None:
    """PyTorch keeps compiled graphs as pickles, for every program that compiles the same.

    Pickle calls what has no module of its own, as ``torch.contiguous_format``, after the first
    module in ``sys.modules`` that has it. ``multiprocessing`` enters the main module there a second
    time, before torch: if that imports torch, graphs would name it, and a program with another main
    module could not read them. So the second entry goes to the end.
    """
    main = sys.modules.pop("__mp_main__", None)
    if main is not None:
        sys.modules["__mp_main__"] = main


def shard_model(
    model: nn.Module,
    layers: list[nn.Module],
    *,
    n_ranks: int,
    device: torch.device,
    compute_dtype: torch.dtype,
) -> nn.Module:
    """Shards each layer of ``model``, and the rest of it, over all ranks, in place.

    Args:
        model: runs all nano-batches of a step in one call.
        layers: of it, in the order of a forward pass.
        n_ranks: all ranks.
        device: of this rank.
        compute_dtype: of gathered weights and activations; gradients are reduced in float32.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (n_ranks,))
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
    sharded: list[Any] = [
        # The backward pass needs the last one's weights first: they stay gathered.
        shard(layer, reshard_after_forward=layer is not layers[-1])
        for layer in layers
    ]
    shard(model, reshard_after_forward=False)
    for before, after in itertools.pairwise(sharded):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    prepare_turns(model)
    return model
