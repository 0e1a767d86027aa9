"""The decoder of an attached model: all of its layers, without head and loss.

It is called with all documents of a step in one packed row. Where a step has several nano-batches,
the row is split here, they take turns, and outputs are put together again: head, loss and whatever
follows see what they would see without DistCA.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer_client.errors import SessionError
from trainer_client.hooks.compile_boundary import outside_graphs
from trainer_client.models.document_check import (
    UnsupportedModel,
    attention_modules,
    check_given,
)
from trainer_client.step.lane import Lane, current_lane
from trainer_client.step.ping_pong import Call, TakenTurns
from trainer_client.turns.parts import RowPart, joined, neighbours, rows_joined

_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")


def decoder_of(model: nn.Module) -> PreTrainedModel:
    """The innermost model of transformers in ``model`` that holds every layer which calls core
    attention."""
    callers = attention_modules(model)
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    holders = [module for module in models if all(_holds(module, each) for each in callers)]
    if not holders:
        raise UnsupportedModel(
            f"{type(model).__name__} holds several models that call core attention; give all but "
            "one attn_implementation='sdpa'"
        )
    decoder = holders[-1]
    if has_head(decoder):
        raise UnsupportedModel(
            f"{type(decoder).__name__} keeps its layers beside its head, so that no row can be "
            "packed or split inside it; give it another implementation"
        )
    return decoder


def has_head(model: PreTrainedModel) -> bool:
    """Return whether its outputs are not its rows, so that it cannot be a decoder."""
    untyped: Any = model
    return untyped.get_output_embeddings() is not None


def _holds(module: nn.Module, other: nn.Module) -> bool:
    return any(each is other for each in module.modules())


class DecoderInTurns:
    """Has what may be a decoder run its rows in turns, where it is called in several lanes.

    Args:
        decoder: whose forward is replaced on the object; not while it is called, since PyTorch asks
            for it before hooks run.
        lanes: of its forward that runs; fewer than two: it runs as before.
    """

    def __init__(
        self, decoder: PreTrainedModel, lanes: Callable[[nn.Module], Sequence[Lane]]
    ) -> None:
        self._decoder, self._lanes = decoder, lanes
        self._forward: Callable[..., Any] = decoder.forward
        untyped: Any = decoder
        untyped.forward = self._bound()

    def _bound(self) -> Callable[..., Any]:
        """A method that looks like the forward it stands for. That of a copy of the decoder, which
        an average of weights is or a model kept for comparison, runs the copy as it was before."""
        decoder, own = self._decoder, self._forward

        @functools.wraps(own)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is decoder:
                return self._run(args, kwargs)
            if isinstance(own, MethodType):
                return own.__func__(module, *args, **kwargs)
            return type(module).forward(module, *args, **kwargs)

        bound: Any = outside_graphs(forward)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = inspect.signature(own).parameters.values()
        bound.__signature__ = inspect.Signature([first, *parameters])
        return MethodType(bound, decoder)

    def _run(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The decoder's outputs for all rows; arguments that were planned have names."""
        lanes = self._lanes(self._decoder)
        if len(lanes) < 2 or current_lane.get() is not None:
            return self._forward(*args, **named)
        running, first = lanes[0].running, lanes[0].nano_batch
        parts = neighbours([running.n_rows(lane.nano_batch) for lane in lanes])
        calls: list[Call] = []
        for lane, rows in zip(lanes, parts, strict=True):
            lengths = [length for _, _, length in running.segments(lane.nano_batch)]
            cut = {
                name: self._part(name, value, rows, parts[-1].end, lengths)
                for name, value in named.items()
            }
            calls.append(((), cut))
        turns = TakenTurns(self._run_part, running, calls, first=first)
        return joined(turns.run(), functools.partial(self._join, parts=parts))

    def _run_part(self, **named: Any) -> Any:
        check_given(self._decoder, (), named)
        return self._forward(**named)

    def _part(self, name: str, value: Any, rows: RowPart, total: int, lengths: list[int]) -> Any:
        if name in _LENGTHS and value is not None:
            cumulative = torch.tensor([0, *lengths]).cumsum(0)
            return cumulative.to(value.device, value.dtype)
        if name in _LONGEST and value is not None:
            return max(lengths, default=0)
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        if value.shape[:2] == (1, total):
            return rows.of(value, 1)
        raise SessionError(
            f"{type(self._decoder).__name__} is called with {name} of shape {tuple(value.shape)}, "
            f"not [1, {total}, ...]; leave it out, or attach with turns=1"
        )

    def _join(self, outputs: Sequence[Any], parts: Sequence[RowPart]) -> Any:
        if outputs[0] is None:
            return None
        if all(isinstance(output, torch.Tensor) for output in outputs):
            sizes = [part.n_rows for part in parts]
            # Those of experts' routers, for example, have no dimension of one row.
            for dim, row in ((1, (1,)), (0, ())):
                whole = [(*row, n) for n in sizes]
                if [tuple(o.shape[: dim + 1]) for o in outputs] == whole:
                    return rows_joined(outputs, parts, dim)
        shown = getattr(outputs[0], "shape", type(outputs[0]).__name__)
        raise SessionError(
            f"{type(self._decoder).__name__} gives an output ({shown}) that cannot be joined by "
            "rows; attach with turns=1"
        )
