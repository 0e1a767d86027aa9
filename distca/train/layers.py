"""The layers of a transformers model, and what is hung on them: checkpoints and lanes.

Several nano-batches run through one module at a time. What depends on all of them having left it
(freeing gathered weights, reducing gradients) is told here.
"""

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

    Raises:
        SettingsError: the layers are on the CPU, and this machine has no C++ compiler.
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


class LaneGate:
    """Makes several nano-batches that interleave in a layer look like one to hooks on it.

    Of the hooks that take the layer's inputs to learn when the backward pass leaves it, only those
    of the first nano-batch to enter do so: autograd mirrors the order of the forward pass, so it
    is the last to leave. The hidden states of the others pass by out of their sight.

    Args:
        layer: takes the hidden states first, or as ``hidden_states``.
        n_lanes: nano-batches of a step.
        left_forward: called when the last nano-batch has left the layer in the forward pass.
    """

    def __init__(self, layer: nn.Module, n_lanes: int, *, left_forward: Callable[[], None]) -> None:
        self._n_lanes = n_lanes
        self._left_forward = left_forward
        self._forward = layer.forward
        self._entered = self._left = 0
        self._inside_backward = 0
        layer.forward = self._run
        layer.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        layer.register_forward_hook(self._leave)

    def begin_step(self) -> None:
        """Forgets a step that was given up."""
        self._entered = self._left = self._inside_backward = 0

    def leave_backward(self, lane: int) -> None:
        """The nano-batch that entered as number ``lane`` leaves in the backward pass.

        Raises:
            RuntimeError: the first one does so before others.
        """
        self._inside_backward -= 1
        if lane == 0 and self._inside_backward:
            raise RuntimeError(
                "the nano-batch that entered a layer first has left it in the backward pass before "
                "another one, whose gradients would be lost; sum the losses of all nano-batches "
                "and call backward once"
            )

    def _enter(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        lane, self._entered = self._entered, (self._entered + 1) % self._n_lanes
        hidden, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        if hidden.requires_grad and torch.is_grad_enabled():
            self._inside_backward += 1
        if lane == 0:
            return (hidden, _Passage(lane), *rest), kwargs
        return (None, _Passage(lane, hidden), *rest), kwargs

    def _run(
        self, hidden: torch.Tensor | None, passage: _Passage, *args: Any, **kwargs: Any
    ) -> Any:
        hidden = passage.hidden if hidden is None else hidden
        entered: torch.Tensor = _Entry.apply(hidden, self, passage.lane)  # type: ignore[no-untyped-call]
        return self._forward(entered, *args, **kwargs)

    def _leave(self, *_: Any) -> None:
        self._left += 1
        if self._left == self._n_lanes:
            self._left = 0
            self._left_forward()


class _Passage:
    """Hidden states that hooks do not find."""

    def __init__(self, lane: int, hidden: torch.Tensor | None = None) -> None:
        self.lane = lane
        self.hidden = hidden


class _Entry(torch.autograd.Function):
    """The identity; tells in the backward pass that the layer is left."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, gate: LaneGate, lane: int) -> torch.Tensor:
        ctx.gate, ctx.lane = gate, lane
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.gate.leave_backward(ctx.lane)
        return gradient, None, None
