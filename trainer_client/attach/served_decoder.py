"""Forward passes of models of transformers whose documents are read when they come."""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

import trainer_client.models.transformers  # noqa: F401  # registers the implementation
from trainer_client.attach.call_rows import CallRows
from trainer_client.attach.decoder import (
    DecoderInTurns,
    decoder_of,
    has_head,
)
from trainer_client.attach.forward import Forward, OpenWith
from trainer_client.attach.zero_rows import ZeroRows
from trainer_client.hooks.checkpointing import recomputed_caller
from trainer_client.models.document_check import (
    check_of,
    is_served_model,
    refuse_branches,
    refuse_own_positions,
)
from trainer_client.models.documents import Documents, documents_of, of_forwards
from trainer_client.models.entrance import entrances
from trainer_client.models.found_options import options_of_model
from trainer_client.models.layer_masks import LaterMask
from trainer_client.step.fsdp import prepare_turns
from trainer_client.step.lane import Lane


class ServedDecoder:
    """The entrance of a model whose decoder is served; see
    :class:`trainer_client.models.entrance.Entrance`.

    Args:
        model: holds one model of transformers with served attention.
        steps: see :data:`trainer_client.attach.forward.OpenWith`.
        turns: nano-batches of a forward.
    """

    def __init__(self, model: nn.Module, steps: OpenWith, turns: int) -> None:
        if not is_served_model(model):
            raise ValueError(
                f"{type(model).__name__} holds no model with attn_implementation='distca'; load "
                "it with that after 'import distca'"
            )
        self._steps, self._turns = steps, turns
        # The table of entrances holds this one as long as the model lives.
        self._decoder: weakref.ref[PreTrainedModel] | None = None
        self._forwards: list[tuple[Forward, Callable[[Any], Any]]] = []
        models = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
        entrances.update((each, self) for each in models)
        for each in models if turns > 1 else ():
            if not has_head(each):
                DecoderInTurns(each, self._lanes)

    def enter(self, model: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
        """Plans a forward of the decoder, and packs its rows."""
        if self._decoder is None:
            found = decoder_of(model)
            if self._turns > 1:
                prepare_turns(model)
            self._decoder = weakref.ref(found)
        decoder = self._decoder()
        if decoder is None or model is not decoder:
            return named
        steps = self._steps(functools.partial(options_of_model, decoder))
        forward = Forward(decoder)
        # What a checkpoint runs again has its step.
        begins = recomputed_caller() is None
        if (zeros := ZeroRows.of(decoder, named)) is not None:
            # For collectives of the weights.
            if begins:
                forward.begin_without_rows(steps)
            self._forwards.append((forward, zeros.emptied))
            return {**zeros.filled(named), "attention_mask": None}
        rows = CallRows.of(named)
        documents = _documents(rows)
        given = _packed(decoder, named, rows, documents)
        if begins:
            forward.begin(steps, rows.documents)
        if len(forward.lanes) == 1:
            of_forwards[forward.lanes[0]] = documents
        self._forwards.append((forward, rows.padded))
        return given

    def leave(self, model: nn.Module, output: Any) -> Any:
        """The decoder's outputs, as for the batch that it was called with."""
        if not self._forwards or self._decoder is None or model is not self._decoder():
            return output
        forward, restored = self._forwards.pop()
        forward.end(output)
        if forward.has_failed:
            return output
        if len(forward.lanes) == 1:
            lane = forward.lanes[0]
            lane.running.check_at_end(documents_of(lane).check_all)
        return restored(output)

    def _lanes(self, model: nn.Module) -> list[Lane]:
        """The lanes of a forward of ``model`` that runs; none if it is not the decoder."""
        is_decoder = self._decoder is not None and model is self._decoder()
        return self._forwards[-1][0].lanes if is_decoder and self._forwards else []


def holds_transformers(model: nn.Module) -> bool:
    """Return whether ``model`` is or holds a model of transformers."""
    return any(isinstance(module, PreTrainedModel) for module in model.modules())


def _documents(rows: CallRows) -> Documents:
    begins = itertools.accumulate(rows.lengths[:-1], initial=0)
    offsets = rows.documents.offsets
    return Documents("the row of a forward", [*zip(begins, offsets, rows.lengths, strict=True)])


def _packed(
    decoder: PreTrainedModel, named: dict[str, Any], rows: CallRows, documents: Documents
) -> dict[str, Any]:
    """Return the decoder's arguments as one row whose positions say where documents begin."""
    given, mask = rows.packed(named), named.get("attention_mask")
    if rows.documents.branches is not None:
        refuse_branches(decoder)
    device = next(decoder.parameters()).device
    if rows.rows is not None:
        if given.get("position_ids") is None:
            refuse_own_positions(decoder)
        given["position_ids"] = rows.positions(device)
    given["attention_mask"] = tree_map_only(
        LaterMask,
        lambda each: each.of(documents),
        None if isinstance(mask, torch.Tensor) else mask,
    )
    counts = all(check.counts_from_zero for check in map(check_of, decoder.modules()) if check)
    if given.get("position_ids") is None and counts:
        given["position_ids"] = rows.positions(device)
    if "use_cache" in inspect.signature(decoder.forward).parameters:
        given["use_cache"] = False
    return given
