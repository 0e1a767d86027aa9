"""Samples packed as trees: what several have in common at their beginning is computed once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core_attention.arrays import Int64Array, runs_to_rows
from core_attention.host_copies import on_device, on_host
from trainer_client.loops.token_scores import Head, score
from trainer_client.loops.trie import Trie


class Tree:
    """The rows of all samples, or a rank's share of them, as :func:`pack_tree` makes it.

    Attributes:
        inputs: arguments of the model: ``input_ids`` and ``position_ids`` ``[1, rows]``, and for
            each document in packed order, int64 on the CPU, ``document_lengths``, its rows;
            ``document_parents``, the index of its parent among the documents of its parent's rank,
            or -1; ``document_offsets``, the position on its parent's path where it begins; and with
            several ranks ``document_parent_ranks``.
        n_rows: that this rank computes.
        n_tokens: of all samples.
        logits_to_keep: ``[kept]`` int64, the rows that predict tokens which are scored. A model of
            transformers that is given them makes no other logits.
    """

    def __init__(
        self,
        samples: Sequence[Int64Array],
        scored_from: Int64Array,
        device: torch.device,
        rank: int,
        world_size: int,
    ) -> None:
        whole = Trie.of(samples)
        bounds = np.arange(world_size + 1) * int(whole.lengths.sum()) // world_size
        self._trie = trie = whole.cut(bounds[:-1][bounds[:-1] < bounds[-1]])
        firsts = np.searchsorted(trie.begins, bounds)
        self._mine = mine = slice(int(firsts[rank]), int(firsts[rank + 1]))
        own = slice(int(bounds[rank]), int(bounds[rank + 1]))
        self.n_tokens, self.n_rows = int(trie.ends.sum()), own.stop - own.start
        tokens = np.concatenate([samples[i][a:b] for i, a, b in trie.parts()])
        ranks = np.searchsorted(firsts, trie.parents, side="right") - 1
        parents = np.where(trie.parents < 0, -1, trie.parents - firsts[ranks])
        columns = {"lengths": trie.lengths, "parents": parents, "offsets": trie.offsets}
        if world_size > 1:
            columns["parent_ranks"] = np.where(trie.parents < 0, -1, ranks)
        positions = runs_to_rows(trie.offsets[mine], trie.lengths[mine])
        self.inputs: dict[str, torch.Tensor] = {
            "input_ids": on_device(torch.from_numpy(tokens[own])[None], device),
            "position_ids": on_device(torch.from_numpy(positions)[None], device),
            **{f"document_{name}": torch.tensor(each[mine]) for name, each in columns.items()},
        }
        self._positions: list[torch.Tensor] = []
        self._find_predictions(tokens, own, scored_from)
        self.logits_to_keep = on_device(self._rows.unique_consecutive(), device)

    def _find_predictions(self, tokens: Int64Array, own: slice, scored_from: Int64Array) -> None:
        """Find the tokens that rows of this rank predict, ordered by these rows.

        Args:
            tokens: ``[rows]`` of all ranks.
            own: the rows of this one.
            scored_from: ``[samples]`` first positions that are scored, at least 1.
        """
        predictors = self._trie.predictors()
        is_mine = (predictors >= own.start) & (predictors < own.stop)
        of_samples = []
        for sample, first in enumerate(scored_from.tolist()):
            rows = self._trie.rows_of(sample, first)
            of_samples.append(rows[is_mine[rows]])
            self._positions.append(torch.from_numpy(first + np.flatnonzero(is_mine[rows])))
        scored = np.concatenate(of_samples)
        places = np.full(len(tokens), -1)
        places[scored] = 0
        targets = np.flatnonzero(places == 0)
        targets = targets[np.argsort(predictors[targets], kind="stable")]
        places[targets] = np.arange(len(targets))
        self._index = torch.from_numpy(places[scored])
        self._tokens = torch.from_numpy(tokens[targets])
        self._rows = torch.from_numpy(predictors[targets] - own.start)

    def log_probs(
        self, logits: torch.Tensor, head: Head | None = None, *, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """Log-probabilities of each sample's tokens 1 to n - 1, or of those behind its prompt, with
        gradients; with several ranks, of those that rows of this one predict (:meth:`part`).

        Args:
            logits: ``[1, rows, vocabulary]``, of all rows or of :attr:`logits_to_keep`; with
                ``head`` hidden states ``[1, rows, hidden]`` instead.
            head: the model's, ``lm_head``: logits are made for 1,024 rows at a time, and again in
                the backward pass.
            temperature: divides logits.

        Returns:
            ``[scored]`` of each sample, float32 or wider.
        """
        return self._scores(logits, head, temperature, entropies=False)[0]

    def log_probs_and_entropies(
        self, logits: torch.Tensor, head: Head | None = None, *, temperature: float = 1.0
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """As :meth:`log_probs`, and the entropies of the distributions that the tokens are of."""
        log_probs, entropies = self._scores(logits, head, temperature, entropies=True)
        return log_probs, entropies

    def _scores(
        self, given: torch.Tensor, head: Head | None, temperature: float, *, entropies: bool
    ) -> list[list[torch.Tensor]]:
        rows, kept = given.flatten(0, -2), len(self.logits_to_keep)
        if len(rows) not in (self.n_rows, kept):
            raise ValueError(
                f"logits have {len(rows)} rows; valid are all {self.n_rows}, or the {kept} of "
                "logits_to_keep"
            )
        if head is not None and len(rows) == self.n_rows:
            rows = rows[self.logits_to_keep.to(rows.device)]
        predicting = self._rows
        if len(rows) == kept:
            predicting = self._rows.unique_consecutive(return_inverse=True)[1]
        scores = score(rows, head, predicting, self._tokens, temperature, entropies=entropies)
        index = on_device(self._index, rows.device)
        counts = [len(each) for each in self._positions]
        return [list(each[index].split(counts)) for each in scores]

    def part(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Pick from ``[n, ...]`` of each sample what :meth:`log_probs` has log-probabilities of."""
        pairs = zip(values, self._positions, strict=True)
        return [of_sample[on_device(at, of_sample.device)] for of_sample, at in pairs]

    def pack(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pack ``[n, ...]`` of each sample like its tokens, ``[1, rows, ...]``; a row that several
        samples share has the value of one of them."""
        if [len(each) for each in values] != (lengths := self._trie.ends.tolist()):
            raise ValueError(f"values must have {lengths[:8]}... rows, as the samples have tokens")
        documents = self._trie.parts(self._mine)
        return torch.cat([values[i][a:b] for i, a, b in documents] or [values[0][:0]])[None]


def pack_tree(
    samples: Sequence[Sequence[int] | torch.Tensor],
    *,
    prompt_lengths: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Tree:
    """Pack samples so that what several share at their beginning is there once.

    Call the model with ``**tree.inputs``, and ``tree.log_probs`` with its logits.

    Args:
        samples: token ids, ``[n]`` each. Prompts may differ, samples occur several times, and one
            may be the beginning of another.
        prompt_lengths: tokens of each that are not scored; None: the first is not.
        device: of ``input_ids`` and ``position_ids``; None: that of the samples.
        rank: whose share to pack.
        world_size: ranks that share the rows, equally many each; all give the same samples.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; valid are 0 to world_size - 1, {world_size - 1}")
    if not len(samples):
        raise ValueError("samples has none; give one or more")
    tokens = [_token_ids(sample, at) for at, sample in enumerate(samples)]
    scored_from = np.ones(len(tokens), np.int64)
    if prompt_lengths is not None:
        scored_from = np.maximum(np.asarray(prompt_lengths, np.int64), 1)
    lengths = np.array([len(each) for each in tokens])
    if scored_from.shape != lengths.shape or (scored_from > lengths).any():
        raise ValueError(
            f"prompt_lengths are {list(prompt_lengths or ())[:8]}...; give one for each of "
            f"{len(tokens)} samples, at most its length"
        )
    if device is None:
        device = samples[0].device if isinstance(samples[0], torch.Tensor) else "cpu"
    return Tree(tokens, scored_from, torch.device(device), rank, world_size)


def _token_ids(sample: Sequence[int] | torch.Tensor, at: int) -> Int64Array:
    tokens = np.asarray(on_host(sample) if isinstance(sample, torch.Tensor) else sample)
    if tokens.ndim != 1 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"samples[{at}] has shape {tokens.shape} and dtype {tokens.dtype}; give one or more "
            "token ids in a row"
        )
    return tokens.astype(np.int64)
