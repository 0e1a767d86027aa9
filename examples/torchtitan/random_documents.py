"""Packed documents of random tokens, so that examples need no data: a data loader of torchtitan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer


class RandomDocuments(BaseDataLoader):
    """Batches ``[B, L]`` of documents with log-normal lengths."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocabulary: int = 256
        """Tokens are below this."""

        median: int = 0
        """Length of the median document; 0 is a sixteenth of the sequence."""

        seed: int = 0
        """Of lengths and tokens."""

        infinite: bool = True
        """Whether batches never end, or after an epoch; torchtitan's validator says which."""

        epoch: int = 16
        """Batches of an epoch."""

    def __init__(
        self,
        config: Config,
        *,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        self._config, self._rank = config, dp_rank
        self._seq_len, self._rows = seq_len, local_batch_size
        self._drawn = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while self._config.infinite or self._drawn < self._config.epoch:
            generator = torch.Generator().manual_seed(
                (self._config.seed * 1_000_003 + self._drawn) * 1_009 + self._rank
            )
            self._drawn += 1
            ids = torch.randint(
                self._config.vocabulary, (self._rows, self._seq_len + 1), generator=generator
            )
            positions = torch.stack([self._positions(generator) for _ in range(self._rows)])
            yield {"input": ids[:, :-1], "positions": positions}, ids[:, 1:]

    def _positions(self, generator: torch.Generator) -> torch.Tensor:
        """``[L]``, 0 where a document begins."""
        median = self._config.median or max(1, self._seq_len // 16)
        parts: list[torch.Tensor] = []
        left = self._seq_len
        while left:
            drawn = median * torch.empty(()).normal_(0, 1.3, generator=generator).exp()
            length = min(left, max(1, int(drawn)))
            parts.append(torch.arange(length))
            left -= length
        return torch.cat(parts)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._drawn = state_dict["drawn"]


class NoTokenizer(BaseTokenizer):
    """Tokens are drawn, not read."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 0
