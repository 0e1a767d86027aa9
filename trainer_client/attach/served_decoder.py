"""Forward passes of models of transformers whose documents are read when they come."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

from torch import nn
from transformers import PreTrainedModel

import trainer_client.models.transformers  # noqa: F401  # registers the implementation
from core_attention.shape import AttentionShape
from trainer_client.attach.call_rows import CallRows
from trainer_client.attach.forward import Forward, OpenWith
from trainer_client.hooks.checkpointing import recomputed_caller
from trainer_client.hooks.tensor_parallel import with_group
from trainer_client.models.document_check import (
    ModelCall,
    UnsupportedModel,
    attention_modules,
    check_of,
    is_served_model,
    refuse_own_positions,
)
from trainer_client.models.entrance import entrances
from trainer_client.models.probe import CallKind, ProbedAttention, refuse_prompts
from trainer_client.models.whole_rows import decoder_of
from trainer_client.turns.padded_rows import PaddedRows


class ServedDecoder:
    """The entrance of a model whose decoder is served; see
    :class:`trainer_client.models.entrance.Entrance`.

    Args:
        model: holds one model of transformers with served attention.
        steps: see :data:`trainer_client.attach.forward.OpenWith`.

    Raises:
        ValueError: ``model`` holds none.
    """

    def __init__(self, model: nn.Module, steps: OpenWith) -> None:
        if not is_served_model(model):
            raise ValueError(
                f"{type(model).__name__} holds no model with attn_implementation='distca'; load "
                "it with that after 'import distca'"
            )
        self._steps = steps
        # The table of entrances holds this one as long as the model lives.
        self._decoder: weakref.ref[PreTrainedModel] | None = None
        self._forwards: list[tuple[Forward, PaddedRows | None]] = []
        models = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
        entrances.update((each, self) for each in models)

    def enter(self, model: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
        """Plans a forward of the decoder, and packs its rows.

        Raises:
            ManifestError: its arguments do not say where documents begin.
            UnsupportedModel: it cannot be served.
            PlanNotReady, SessionClosed: as of :meth:`Session.begin`.
        """
        if self._decoder is None:
            self._decoder = weakref.ref(decoder_of(model))
        decoder = self._decoder()
        if decoder is None or model is not decoder:
            return named
        steps = self._steps(functools.partial(_complete, decoder))
        rows, forward = CallRows.of(named), Forward()
        given = _packed(decoder, named, rows)
        # What a checkpoint runs again has its step.
        if recomputed_caller() is None:
            forward.begin(steps, rows.lengths)
        self._forwards.append((forward, rows.padded))
        return given

    def leave(self, model: nn.Module, output: Any) -> Any:
        """The decoder's outputs, as for the batch that it was called with.

        Raises:
            SessionError: it called core attention less often than the job expects.
        """
        if not self._forwards or self._decoder is None or model is not self._decoder():
            return output
        forward, padded = self._forwards.pop()
        forward.end()
        return output if padded is None or forward.has_failed else padded.padded(output)


def holds_transformers(model: nn.Module) -> bool:
    """Return whether ``model`` is or holds a model of transformers."""
    return any(isinstance(module, PreTrainedModel) for module in model.modules())


def _packed(decoder: PreTrainedModel, named: dict[str, Any], rows: CallRows) -> dict[str, Any]:
    """Return the decoder's arguments as one row whose positions say where documents begin."""
    given = dict(named)
    if rows.padded is not None:
        if given.get("position_ids") is None:
            refuse_own_positions(decoder)
        given = rows.padded.packed(given)
    given["attention_mask"] = None
    counts = all(check.counts_from_zero for check in map(check_of, decoder.modules()) if check)
    if given.get("position_ids") is None and counts:
        given["position_ids"] = rows.positions(next(decoder.parameters()).device)
    if "use_cache" in inspect.signature(decoder.forward).parameters:
        given["use_cache"] = False
    return given


def _complete(decoder: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a session, with those that follow from the decoder. The check of documents has
    found them: it runs on sharded weights too, where all ranks come together."""
    refuse_prompts(decoder)
    checks = (check_of(module) for module in attention_modules(decoder))
    check = next(check for check in checks if check is not None)
    calls = check.served_calls
    if different := next((call for call in calls if call != calls[0]), None):
        raise UnsupportedModel(
            f"all core attention that is served has one shape, dtype and scale, and the model has "
            f"{calls[0]} and {different}; give one of them another implementation"
        )
    device = next(decoder.parameters()).device
    kind = CallKind(shape=_shape(calls[0]), softmax_scale=calls[0].scale, device=device)
    found = ProbedAttention(n_layers=len(calls), kind=kind).complete(options)
    return with_group(decoder, found)


def _shape(call: ModelCall) -> AttentionShape:
    return AttentionShape(
        num_heads=call.num_heads,
        num_heads_kv=call.num_heads_kv,
        head_dim=call.head_dim,
        head_dim_v=call.head_dim_v,
        dtype=call.dtype,
        softcap=call.softcap,
        mask=call.mask,
    )
