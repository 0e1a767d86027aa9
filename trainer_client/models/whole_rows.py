"""Ping-pong inside a model that is called with whole rows, as trainers of others call it.

Trainers of transformers, TRL, accelerate and Lightning call ``model(**batch)`` once, with all
documents of a step in one packed row, and do what they like with the outputs. Here the row is split
inside the model: its decoder (all layers, without head and loss) runs the nano-batches in turns,
and its outputs are put together again. Head, loss and whatever follows see what they would see
without DistCA.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer_client.errors import SessionError
from trainer_client.hooks.checkpointing import recomputes
from trainer_client.hooks.compile_boundary import outside_graphs
from trainer_client.hooks.sharded_weights import require_prepared
from trainer_client.local_attention.at_home import is_at_home, rows_are_split
from trainer_client.models.document_check import (
    UnsupportedModel,
    attention_modules,
    refuse_own_positions,
    takes_whole_rows,
)
from trainer_client.models.documents import CHECKED, documents_of
from trainer_client.models.probe import refuse_prompts
from trainer_client.step.lane import current_lane, current_step, require_lane
from trainer_client.step.ping_pong import Call, run_in_turns
from trainer_client.step.running_step import RunningStep
from trainer_client.turns.padded_rows import PaddedRows
from trainer_client.turns.parts import RowPart, joined, neighbours, rows_joined

_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")


@contextmanager
def turns_inside(model: nn.Module) -> Iterator[None]:
    """Let ``model`` be called in the block with a whole packed row, ``[1, rows]``, in a step whose
    manifest is split as :func:`~trainer_client.turns.parts.split_documents` does
    (``submit_ahead`` does it for batches that are no sequences), or with a batch that is padded on
    the right. Its decoder runs the nano-batches in turns. Wrap the model in
    DistributedDataParallel or ``fully_shard`` before or after; outside of steps, and under
    ``torch.no_grad`` inside them, it runs as before, with core attention at home.

    Args:
        model: holds one model of transformers with ``attn_implementation="distca"``.

    Raises:
        UnsupportedModel: it cannot be served, or its layers are in no module of their own.
        SessionError: an adapter adds to its rows.
    """
    refuse_prompts(model)
    decoder = decoder_of(model)
    around = [m for m in model.modules() if isinstance(m, PreTrainedModel) and _holds(m, decoder)]
    had_own = "forward" in vars(decoder)
    forward = decoder.forward
    untyped: Any = decoder
    untyped.forward = _WholeRows(decoder, forward).bind()
    added = [each for each in around if each not in takes_whole_rows]
    takes_whole_rows.update(added)
    token = rows_are_split.set(True)
    try:
        yield
    finally:
        rows_are_split.reset(token)
        takes_whole_rows.difference_update(added)
        if had_own:
            untyped.forward = forward
        else:
            del untyped.forward


def decoder_of(model: nn.Module) -> PreTrainedModel:
    """The innermost model of transformers in ``model`` that holds every layer which calls core
    attention.

    Raises:
        UnsupportedModel: it has a head, so that its outputs cannot be put together.
    """
    callers = attention_modules(model)
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    holders = [module for module in models if all(_holds(module, each) for each in callers)]
    if not holders:
        if any(_holds(module, each) for module in models for each in callers):
            raise UnsupportedModel(
                f"{type(model).__name__} holds several models that call core attention; give the "
                "others attn_implementation='sdpa', or PingPong the nano-batches of all"
            )
        raise UnsupportedModel(
            f"{type(model).__name__} holds no model of transformers that calls core attention; "
            "load it with attn_implementation='distca' after 'import "
            "trainer_client.models.transformers'"
        )
    decoder = holders[-1]
    untyped: Any = decoder
    if untyped.get_output_embeddings() is not None:
        raise UnsupportedModel(
            f"{type(decoder).__name__} keeps its layers beside its head, so that no row can be "
            "split inside it; give PingPong the nano-batches yourself"
        )
    return decoder


def _holds(module: nn.Module, other: nn.Module) -> bool:
    return any(each is other for each in module.modules())


class _WholeRows:
    """The forward of a decoder that is called with a whole row.

    Args:
        decoder: whose.
        forward: its own.
    """

    def __init__(self, decoder: PreTrainedModel, forward: Callable[..., Any]) -> None:
        self._decoder = decoder
        self._checked = False
        self._name = type(decoder).__name__
        self._forward = forward
        self._parameters = inspect.signature(forward).parameters

    def bind(self) -> Callable[..., Any]:
        """A method that looks like the forward it stands for. That of a copy of the decoder, which
        an average of weights is or a model kept for comparison, runs the copy as it was before."""
        decoder, own = self._decoder, self._forward

        @functools.wraps(own)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is decoder:
                return self.call(*args, **kwargs)
            if isinstance(own, MethodType):
                return own.__func__(module, *args, **kwargs)
            return type(module).forward(module, *args, **kwargs)

        bound: Any = outside_graphs(forward)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        bound.__signature__ = inspect.Signature([first, *self._parameters.values()])
        return MethodType(bound, decoder)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The decoder's outputs for all rows."""

        running = current_step.get()
        if running is None or current_lane.get() is not None or is_at_home() or recomputes():
            return self._forward(*args, **kwargs)
        named = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        padded = PaddedRows.of(named)
        if padded is not None:
            refuse_own_positions(self._decoder)
            named = padded.packed(named)
        if self._takes("use_cache"):
            named["use_cache"] = False
        n_rows = [running.n_rows(part) for part in range(running.job.n_nano_batches)]
        n_rows = n_rows[: sum(1 for rows in n_rows if rows)] or [0]
        self._check_rows(running, named, sum(n_rows))
        # On all ranks, also those with one nano-batch: they would wait for who is refused.
        if running.job.n_nano_batches > 1 and not self._checked:
            require_prepared(self._decoder, inside=True)
            self._checked = True
        parts = neighbours(n_rows)
        calls: list[Call] = []
        for nano_batch, rows in enumerate(parts):
            lengths = [length for _, _, length in running.segments(nano_batch)]
            cut = (
                (name, self._part(name, value, rows, sum(n_rows), lengths))
                for name, value in named.items()
            )
            calls.append(((), dict(cut)))
        outputs = run_in_turns(self._run_part, calls, 0, is_last=True, model=self._decoder)
        whole = outputs[0]
        if len(outputs) > 1:
            whole = joined(outputs, functools.partial(self._join, parts=parts))
        return whole if padded is None else padded.padded(whole)

    def _run_part(self, **named: Any) -> Any:
        told = {name: named[name] for name in CHECKED if isinstance(named.get(name), torch.Tensor)}
        documents_of(require_lane()).check(told)
        return self._forward(**named)

    def _takes(self, name: str) -> bool:
        kinds = [parameter.kind for parameter in self._parameters.values()]
        return name in self._parameters or inspect.Parameter.VAR_KEYWORD in kinds

    def _check_rows(self, running: RunningStep, named: Mapping[str, Any], n_rows: int) -> None:
        for name in ("input_ids", "inputs_embeds", "position_ids"):
            given = named.get(name)
            if isinstance(given, torch.Tensor) and tuple(given.shape[:2]) != (1, n_rows):
                advice = (
                    _MADE_OUTSIDE if isinstance(named.get("attention_mask"), dict) else _ONCE_A_STEP
                )
                raise SessionError(
                    f"{self._name} is called with {name} of shape {tuple(given.shape)}; the "
                    f"manifest of step {running.step} has {n_rows} rows; {advice}"
                )

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
            f"{self._name} is called with {name} of shape {tuple(value.shape)}, not [1, {total}, "
            "...]; leave it out, or use n_nano_batches=1 without turns_inside"
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
        raise SessionError(
            f"{self._name} gives outputs ({_describe(outputs[0])}) that cannot be joined by rows; "
            "give PingPong the nano-batches yourself"
        )


_ONCE_A_STEP = "run other forwards under torch.no_grad or in trainer_client.at_home()"
_MADE_OUTSIDE = "pack documents of a padded batch outside, or train the text-only class"


def _describe(value: Any) -> str:
    return (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
    )
