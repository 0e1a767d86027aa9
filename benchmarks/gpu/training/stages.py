"""Stages of a pipeline, cut out of a Llama of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.gpu.training.loss import chunked_loss


class StageModule(nn.Module):
    """Some layers of a Llama, the first ones with its embedding, the last ones with head and loss.

    Its input is one packed row. The last stage gives its loss at the first token, so all outputs
    have a dimension of tokens, in which nano-batches can be put together.

    Args:
        model: the whole model; it is cut in place.
        layers: those of the stage.
    """

    def __init__(self, model: Any, layers: range) -> None:
        super().__init__()
        base = model.model
        self._is_first, self._is_last = layers.start == 0, layers.stop == len(base.layers)
        base.layers = base.layers[layers.start : layers.stop]
        model.config.num_hidden_layers = len(layers)
        if not self._is_first:
            base.embed_tokens = nn.Identity()
        if not self._is_last:
            base.norm = model.lm_head = nn.Identity()
        self.model = model

    @property
    def layers(self) -> list[nn.Module]:
        """Its layers, in order."""
        return list(self.model.model.layers)

    def forward(
        self, given: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states ``[1, n_tokens, width]``; of the last stage ``[1, n_tokens]`` losses.

        Args:
            given: ``[1, n_tokens]`` token ids on the first stage, else hidden states.
            position_ids, labels: ``[1, n_tokens]``.
        """
        name = "input_ids" if self._is_first else "inputs_embeds"
        inputs = {name: given, "position_ids": position_ids, "use_cache": False}
        hidden: torch.Tensor = self.model.model(**inputs).last_hidden_state
        if not self._is_last:
            return hidden
        loss = chunked_loss(hidden[0], self.model.lm_head.weight, labels[0])
        return functional.pad(loss[None, None], (0, labels.shape[1] - 1))
