"""A model chunk's forward, run for the two halves of a microbatch, which take turns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import nn

from trainer_client.frameworks.megatron.attention import ServedCoreAttention
from trainer_client.frameworks.megatron.halves import Half, Layout, halves_of, packed_of
from trainer_client.frameworks.megatron.inside_documents import give_rows_their_positions
from trainer_client.frameworks.megatron.refusals import has_experts_apart
from trainer_client.frameworks.versions import UnsupportedSetting
from trainer_client.hooks.compile_boundary import outside_graphs
from trainer_client.step.ping_pong import Call, run_in_turns

_TOKENS = ("input_ids", "position_ids", "labels", "loss_mask", "padding_mask")
"""Arguments ``[..., b, s]``."""


class HalvesInTurns:
    """Has a model chunk run the halves of each microbatch in turns.

    ``forward`` and ``set_input_tensor`` are replaced on the object, so that what wraps it stays
    around it.

    Args:
        model: ``GPTModel``, ``MambaModel`` or ``HybridModel``.
        inside_documents: whether it may be given the halves of a document.
    """

    def __init__(self, model: Any, *, inside_documents: bool) -> None:
        self._model = model
        self._forward: Callable[..., Any] = model.forward
        self._signature = inspect.signature(model.forward)
        self._set_input: Callable[[Any], None] = model.set_input_tensor
        self._input: Any = None
        # Of the microbatch that runs, with the nano-batch of the first.
        self._running: tuple[Sequence[Half], int] | None = None
        model.forward = self._run
        model.set_input_tensor = self._take_input
        self._hooks = give_rows_their_positions(model) if inside_documents else []
        _tell_what_is_around(model)

    def undo(self) -> None:
        """Gives the model its own methods back."""
        for hook in self._hooks:
            hook.remove()
        self._model.forward, self._model.set_input_tensor = self._forward, self._set_input

    def cut(self, bounds: Sequence[int], *, inside_documents: bool) -> list[Half]:
        """The halves of a microbatch, the same in all chunks."""
        return halves_of(
            bounds,
            multiple=self._shards,
            inside_documents=inside_documents,
            # Experts send tokens to those of other ranks, and await theirs.
            may_be_empty=not has_experts_apart(self._model.config),
        )

    @property
    def _shards(self) -> int:
        """Ranks that share the rows of hidden states."""
        config = self._model.config
        return config.tensor_model_parallel_size if config.sequence_parallel else 1

    @contextmanager
    def running(self, halves: Sequence[Half], first: int) -> Iterator[None]:
        """Forward passes in the block are those of a microbatch with ``halves``, of which ``first``
        is the first one's nano-batch; outside of one, nothing is cut."""
        self._running = halves, first
        try:
            yield
        finally:
            self._running, self._input = None, None

    def _take_input(self, input_tensor: Any) -> None:
        self._set_input(input_tensor)
        self._input = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    @outside_graphs
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """The output for the whole microbatch, as the chunk's own forward would give it."""

        if self._running is None:
            return self._forward(*args, **kwargs)
        (halves, first), named = self._running, self._named(args, kwargs)
        layout = Layout(named.get("packed_seq_params") is not None, self._shards)
        calls = self._calls(named, halves, layout)
        outputs = run_in_turns(self._run_half, calls, first)
        return self._joined(outputs, halves, layout)

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind(*args, **kwargs)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                named |= value
            else:
                named[name] = value
        return named

    def _calls(
        self, named: Mapping[str, Any], halves: Sequence[Half], layout: Layout
    ) -> list[Call]:
        """The arguments of :meth:`_run_half` for each half."""
        if not layout.packed and any(half.begun for half in halves):
            raise UnsupportedSetting(
                "a microbatch is cut inside a document and has no packed_seq_params; hand them to "
                "the model on every stage, or open the steps with cut_documents=False"
            )
        hidden = None
        if not self._model.pre_process:
            hidden = self._whole(self._input, layout)
            _check_rows("the stage's input", hidden.transpose(0, 1), halves, layout)
        for name in _TOKENS:
            if (tokens := named.get(name)) is not None:
                rows = tokens.flatten(0, -3)[0] if tokens.dim() > 2 else tokens
                _check_rows(name, rows, halves, layout)
        return [
            (
                (None if hidden is None else self._split(layout.of_hidden(hidden, half), layout),),
                {name: _part(name, value, half, layout) for name, value in named.items()},
            )
            for half in halves
        ]

    def _run_half(self, hidden: torch.Tensor | None, **named: Any) -> Any:
        if hidden is not None:
            # Before the first layer, so before the other half takes its turn.
            self._set_input([hidden])
        return self._forward(**named)

    def _joined(
        self, outputs: Sequence[Any], halves: Sequence[Half], layout: Layout
    ) -> torch.Tensor:
        if not all(isinstance(output, torch.Tensor) for output in outputs):
            raise UnsupportedSetting(
                f"{type(self._model).__name__} returns {type(outputs[0]).__name__}, and only "
                "tensors can be joined: open the steps with ping_pong=False"
            )
        if self._model.post_process:
            return layout.joined(outputs, halves, hidden=False)
        whole = layout.joined(
            [self._whole(output, layout) for output in outputs], halves, hidden=True
        )
        split = self._split(whole, layout)
        # The ranks' parts are views.
        return split if split is whole else split.clone()

    def _whole(self, hidden: torch.Tensor, layout: Layout) -> torch.Tensor:
        """All rows of hidden states, of which sequence parallelism leaves each rank a part."""
        if not (layout.packed and self._model.config.sequence_parallel):
            return hidden
        gathered: torch.Tensor = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False
        )
        return gathered

    def _split(self, hidden: torch.Tensor, layout: Layout) -> torch.Tensor:
        """This rank's part of them."""
        if not (layout.packed and self._model.config.sequence_parallel):
            return hidden
        own: torch.Tensor = scatter_to_sequence_parallel_region(hidden)
        return own


def _tell_what_is_around(model: nn.Module) -> None:
    """Give core attention the modules that it is part of."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, ServedCoreAttention):
            parts = name.split(".")
            module.around = tuple(modules[".".join(parts[:n])] for n in range(1, len(parts)))


def _check_rows(name: str, rows: torch.Tensor, halves: Sequence[Half], layout: Layout) -> None:
    """Compares ``rows`` ``[b, s, ...]`` with what was planned."""
    planned, documents = sum(half.n_rows for half in halves), halves[-1].last
    if layout.packed and rows.shape[:2] != (1, planned):
        raise ValueError(
            f"{name} has shape {tuple(rows.shape[:2])}, and {planned} packed rows were planned; "
            "run the microbatches of ServedSteps.step in order"
        )
    if not layout.packed and len(rows) != documents:
        raise ValueError(
            f"{name} has {len(rows)} rows without packed_seq_params, and {documents} documents "
            "were planned; hand packed_seq_params to the model on every stage"
        )


def _part(name: str, value: Any, half: Half, layout: Layout) -> Any:
    """An argument of the model, for a half."""
    if value is None or isinstance(value, bool | int | float | str | Enum):
        return value
    if name in _TOKENS:
        return layout.of_tokens(value, half, fill=int(name == "padding_mask"))
    if name == "packed_seq_params":
        return packed_of(value, half)
    if name == "attention_mask":
        # Core attention that is served goes by the documents, as do kernels of packed ones.
        return None
    raise UnsupportedSetting(
        f"the model is called with {name}, which cannot be cut in two; leave it out, or open the "
        "steps with ping_pong=False"
    )
