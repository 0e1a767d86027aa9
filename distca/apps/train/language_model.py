"""A causal language model together with its loss, so that its logits are never whole."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from distca.apps.data.batch import TokenBatch
from distca.apps.train.loss import DEFAULT_CHUNK_ROWS, chunked_loss, summed_loss
from trainer_client.models.document_check import computed_here

logger = logging.getLogger(__name__)

_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Fields of configurations whose models do more to logits than multiply by the head's weight."""

_TRIED_TOKENS = 4


class LanguageModel(nn.Module):
    """A model of transformers whose forward returns the summed loss.

    Args:
        model: a causal language model.
        chunk_rows: rows whose logits exist together, where the head is a plain matrix; with other
            heads all logits are made at once.
        plain_head: whether it is, see :func:`has_plain_head`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        chunk_rows: int = DEFAULT_CHUNK_ROWS,
        *,
        plain_head: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self._chunk_rows = chunk_rows
        self._plain_head = plain_head
        if not plain_head:
            logger.warning(
                "model type %s does more to its logits than a matrix product: they are made whole, "
                "which takes much memory for long batches",
                model.config.model_type,
            )

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Sum of the cross entropy over labels that are not IGNORED_LABEL, a float32 scalar.

        Args:
            input_ids, position_ids, labels: ``[1, n_tokens]``; labels are the next tokens already.
        """
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        if not self._plain_head:
            batch = TokenBatch(input_ids, position_ids, labels)
            return summed_loss(self.model(**inputs).logits, batch)
        hidden = self.model.base_model(**inputs).last_hidden_state
        return chunked_loss(hidden[0], _head(self.model).weight, labels[0], self._chunk_rows)


def _head(model: PreTrainedModel) -> Any:
    untyped: Any = model
    return untyped.get_output_embeddings()


def has_plain_head(model: PreTrainedModel) -> bool:
    """Tests whether logits are the head's product with the last hidden states: as the configuration
    says, and as a few tokens show, since some models scale hidden states in between."""
    if not _looks_plain(model):
        return False
    ids = torch.arange(_TRIED_TOKENS, device=model.device)[None]
    inputs = {"input_ids": ids, "position_ids": ids, "use_cache": False}
    with computed_here(model, _TRIED_TOKENS):
        logits = model(**inputs).logits
        product = _head(model)(model.base_model(**inputs).last_hidden_state)
    # The same product of the same numbers; a factor that matters is further from one.
    return torch.allclose(product, logits.to(product.dtype), rtol=1e-3, atol=0)


def _looks_plain(model: PreTrainedModel) -> bool:
    head = _head(model)
    changed = any(
        getattr(model.config, name, None) not in (None, 1, 1.0) for name in _LOGIT_CHANGES
    )
    return (
        type(head) is nn.Linear
        and head.bias is None
        and model.base_model is not model
        and not changed
    )
