"""Stages of a pipeline, cut out of a transformers model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from distca.data.batch import TokenBatch
from distca.errors import ModelConfigError
from distca.train.language_model import has_plain_head
from distca.train.layers import decoder_layers
from distca.train.loss import chunked_loss, summed_loss
from trainer_client.models.document_check import computed_here

_LAST_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
_TRIED_TOKENS = 4


class StageModule(nn.Module):
    """Some layers of a causal language model, the first ones with its embedding, the last ones with
    its head and loss.

    Args:
        model: the whole model; it is cut in place.
        layers: those of the stage.
        chunk_rows: rows whose logits exist together, where the head is a plain matrix.
        backward_in_parts: PyTorch divides the stage's backwards in two parts, by itself.

    Attributes:
        tied_names: what embedding and head are called in the whole model, if they are one weight.

    Raises:
        ModelConfigError: the model cannot be cut: run in stages, it gives other hidden states.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: range,
        chunk_rows: int,
        *,
        backward_in_parts: bool = False,
    ) -> None:
        super().__init__()
        every = decoder_layers(model)
        self._begin = layers.start
        self._is_first, self.is_last = layers.start == 0, layers.stop == len(every)
        self._plain_head = self.is_last and has_plain_head(model)
        self._chunk_rows = chunk_rows
        self._backward_in_parts = backward_in_parts
        self.is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
        ids = torch.arange(_TRIED_TOKENS, device=model.device)[None]
        self.tied_names = _embedding_names(model) if self.is_tied else ()
        given, expected = _hidden_states(model, every, layers, ids)
        self.model = model
        self._cut(every[layers.start : layers.stop])
        with torch.no_grad(), computed_here(model, _TRIED_TOKENS):
            found = self._hidden(ids if self._is_first else given, ids)
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-3):
            raise ModelConfigError(
                f"model type {model.config.model_type!r} cannot be cut into stages: layers "
                f"{layers.start} to {layers.stop - 1} give other hidden states by themselves; "
                "leave --pipeline-stages out for it"
            )

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """The weight that the first and the last stage share, if this is one of them."""
        if not self.is_tied or self._is_first == self.is_last:
            return None
        module: Any = self.model
        embedding = (
            module.get_input_embeddings() if self._is_first else module.get_output_embeddings()
        )
        weight: nn.Parameter = embedding.weight
        return weight

    def whole_name(self, name: str) -> str:
        """What a parameter of this stage's model is called in the whole model."""
        return re.sub(
            rf"(?<={re.escape(self._list_name)}\.)\d+", lambda m: str(int(m[0]) + self._begin), name
        )

    @property
    def layers(self) -> list[nn.Module]:
        """Its layers, in order."""
        return list(self.model.get_submodule(self._list_name).children())

    def forward(
        self, given: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states ``[rows, n_tokens, width]``; of the last stage ``[rows]`` summed losses.

        Args:
            given: ``[rows, n_tokens]`` token ids on the first stage, else hidden states.
            position_ids, labels: ``[rows, n_tokens]``.
        """
        if not self.is_last:
            return self._hidden(given, position_ids)
        if not self._plain_head:
            logits = self.model(**self._inputs(given, position_ids)).logits
            batches = (
                TokenBatch(*(each[row : row + 1] for each in (labels, position_ids, labels)))
                for row in range(len(labels))
            )
            losses = [summed_loss(logits[i : i + 1], batch) for i, batch in enumerate(batches)]
            return torch.stack(losses)
        hidden, model = self._hidden(given, position_ids), self._untyped
        weight = model.get_output_embeddings().weight
        return torch.stack(
            [
                chunked_loss(
                    rows,
                    weight,
                    row_labels,
                    self._chunk_rows,
                    backward_in_parts=self._backward_in_parts,
                )
                for rows, row_labels in zip(hidden, labels, strict=True)
            ]
        )

    @property
    def _untyped(self) -> Any:
        """The model, whose accessors transformers does not annotate."""
        return self.model

    def _inputs(self, given: torch.Tensor, position_ids: torch.Tensor) -> dict[str, Any]:
        name = "input_ids" if self._is_first else "inputs_embeds"
        return {name: given, "position_ids": position_ids, "use_cache": False}

    def _hidden(self, given: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        base: Any = self.model.base_model
        hidden: torch.Tensor = base(**self._inputs(given, position_ids)).last_hidden_state
        return hidden

    def _cut(self, own: list[nn.Module]) -> None:
        model: Any = self.model
        self._list_name = next(
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers
        )
        parent, _, attribute = self._list_name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, nn.ModuleList(own))
        model.config.num_hidden_layers = len(own)
        if not self._is_first:
            model.set_input_embeddings(nn.Identity())
        if not self.is_last:
            model.set_output_embeddings(nn.Identity())
            norm = next((n for n in _LAST_NORMS if hasattr(model.base_model, n)), None)
            if norm is None:
                raise ModelConfigError(
                    f"model type {model.config.model_type!r} cannot be cut into stages: its last "
                    f"normalisation is none of {', '.join(_LAST_NORMS)}; leave --pipeline-stages "
                    "out for it"
                )
            setattr(model.base_model, norm, nn.Identity())


def _embedding_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Of the weights of embedding and head."""
    untyped: Any = model
    weights = [untyped.get_input_embeddings().weight, untyped.get_output_embeddings().weight]
    every = model.named_parameters(remove_duplicate=False)
    return tuple(name for name, parameter in every if any(parameter is each for each in weights))


def _hidden_states(
    model: PreTrainedModel, every: list[nn.Module], layers: range, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the whole model gives its layers of a stage, and what that stage is to give."""
    seen: dict[int, torch.Tensor] = {}
    base: Any = model.base_model
    with torch.no_grad(), computed_here(model, _TRIED_TOKENS), _inputs_seen(every, seen):
        last = base(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state
    return seen[layers.start], seen.get(layers.stop, last)


@contextmanager
def _inputs_seen(every: list[nn.Module], seen: dict[int, torch.Tensor]) -> Iterator[None]:
    def see(at: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            seen[at] = args[0] if args else kwargs["hidden_states"]

        return hook

    handles = [
        layer.register_forward_pre_hook(see(at), with_kwargs=True) for at, layer in enumerate(every)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
