"""The layers of a transformers model, and what is hung on them: checkpoints and compiled parts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from core_attention.host_compiler import CPP, compiler_trouble
from distca.errors import ModelConfigError, SettingsError
from trainer_client import checkpoint


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of ``model``, in order.

    Raises:
        ModelConfigError: it has no list of as many modules as its configuration says.
    """
    n_layers = model.config.num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return list(module)
    raise ModelConfigError(
        f"model type {model.config.model_type!r} has no list of {n_layers} layers; turn "
        "--activation-checkpointing and --sharding off for it"
    )


def checkpoint_layers(layers: list[nn.Module]) -> None:
    """Has every layer recomputed in the backward pass, but for core attention.

    The layer's ``forward`` is wrapped, not its call: hooks run once, outside.
    """
    for layer in layers:
        layer.forward = _Checkpointed(layer.forward)


def compile_layers(layers: list[nn.Module]) -> None:
    """Compiles what lies between the matrix products and core attention: normalisation, rotary
    embeddings and the feed-forward part, each once for all layers and any number of rows.

    Rotary embeddings are a function of the model's module in transformers, and are compiled for
    every model of that type in the process.
    """
    if next(layers[0].parameters()).device.type == "cpu":
        _require_compiler()
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
    rotate = getattr(source, _ROTARY, None)
    if rotate is not None and not hasattr(rotate, "_torchdynamo_orig_callable"):
        setattr(source, _ROTARY, torch.compile(rotate, dynamic=True))


def _require_compiler() -> None:
    """PyTorch writes C++ for the CPU, and reports a missing compiler in the midst of a step. Its
    code for GPUs needs what Triton needs, which core attention has found by then."""
    trouble = compiler_trouble(CPP)
    if trouble is not None:
        raise SettingsError(
            f"--compile-layers is on, and {trouble.cause}; {trouble.advice}, or leave it off (the "
            "images built with VARIANT=cuda have a compiler, those for CPUs have none)"
        )


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


_ROTARY = "apply_rotary_pos_emb"


class _Checkpointed:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._forward, *args, **kwargs)
