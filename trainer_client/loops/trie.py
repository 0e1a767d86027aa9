"""Samples as documents that share their prefixes: each position of a prefix is there once.

The *path* of a document is that of its parent up to the position where it begins, and then its own
rows. A sample is a path up to some position, so no document ends where another one branches off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from core_attention.arrays import Int64Array, distinct, exclusive_cumsum

_FEW = 64
"""Tokens that are compared at first, and twice as many each time: work stays linear in those that
are equal."""


@dataclass(frozen=True, eq=False)
class Trie:
    """Documents, parents first, in the order in which samples bring new tokens.

    Attributes:
        sources: ``[documents]`` a sample that holds the whole path.
        offsets: ``[documents]`` the position on its path at which a document begins.
        lengths: ``[documents]`` its own rows.
        parents: ``[documents]``, or -1.
        ends: ``[samples]`` their lengths.
        leaves: ``[samples]`` the document that holds a sample's last position.
    """

    sources: Int64Array
    offsets: Int64Array
    lengths: Int64Array
    parents: Int64Array
    ends: Int64Array
    leaves: Int64Array

    @classmethod
    def of(cls, samples: Sequence[Int64Array]) -> Trie:
        """Read samples, none of them empty, in a time that is linear in their tokens."""
        sources: list[int] = []
        offsets: list[int] = []
        parents: list[int] = []
        leaves: list[int] = []
        branches: dict[tuple[int, int, int], int] = {}
        for sample, tokens in enumerate(samples):
            document, position = -1, 0
            while position < len(tokens):
                branch = document, position, int(tokens[position])
                if branch not in branches:
                    branches[branch] = len(sources)
                    sources.append(sample)
                    offsets.append(position)
                    parents.append(document)
                document = branches[branch]
                path = samples[sources[document]]
                position = _equal_until(path, tokens, position)
                if position == len(path):
                    # Nothing branches off behind a document's end: it grows.
                    sources[document], position = sample, len(tokens)
            leaves.append(document)
        begins, ends = np.array(offsets), np.array([len(each) for each in samples])
        lengths = ends[sources] - begins
        return cls(np.array(sources), begins, lengths, np.array(parents), ends, np.array(leaves))

    @cached_property
    def begins(self) -> Int64Array:
        """``[documents]`` the first row of each, where all lie in one row."""
        return exclusive_cumsum(self.lengths)

    def cut(self, cuts: Int64Array) -> Trie:
        """Cut documents, each into a chain, at the rows ``cuts``, which are of all in one row."""
        begins = self.begins
        pieces = distinct(np.concatenate([begins, cuts]))

        def piece_of(documents: Int64Array, positions: Int64Array) -> Int64Array:
            rows = begins[documents] + positions - self.offsets[documents]
            return np.searchsorted(pieces, rows, side="right") - 1

        whole = np.searchsorted(begins, pieces, side="right") - 1
        into = pieces - begins[whole]
        offsets = self.offsets[whole] + into
        above = np.where(into > 0, whole, self.parents[whole])
        parents = np.where(above < 0, -1, piece_of(above, offsets - 1))
        lengths = np.diff(pieces, append=self.lengths.sum())
        leaves = piece_of(self.leaves, self.ends - 1)
        return Trie(self.sources[whole], offsets, lengths, parents, self.ends, leaves)

    def parts(self, documents: slice = slice(None)) -> list[tuple[int, int, int]]:
        """The sample and its positions ``[begin, end)`` that the rows of each document are."""
        sources, begins = self.sources[documents], self.offsets[documents]
        ends = begins + self.lengths[documents]
        return list(zip(sources.tolist(), begins.tolist(), ends.tolist(), strict=True))

    def rows_of(self, sample: int, first: int) -> Int64Array:
        """The rows of a sample's positions from ``first`` on, where all lie in one row."""
        document, end = self.leaves[sample], self.ends[sample]
        runs: list[Int64Array] = []
        while end > first:
            begin = max(self.offsets[document], first)
            row = self.begins[document] - self.offsets[document]
            runs.append(np.arange(row + begin, row + end))
            document, end = self.parents[document], begin
        return np.concatenate(runs[::-1]) if runs else np.zeros(0, np.int64)

    def predictors(self) -> Int64Array:
        """``[rows]`` the row before each one on its path, which predicts its token; or -1."""
        found = np.arange(-1, self.lengths.sum() - 1)
        above = self.parents
        behind = self.begins[above] + self.offsets - 1 - self.offsets[above]
        found[self.begins] = np.where(above < 0, -1, behind)
        return found


def _equal_until(path: Int64Array, tokens: Int64Array, begin: int) -> int:
    """Return the first position from ``begin`` on where two samples differ, or the shorter ends."""
    end, step = min(len(path), len(tokens)), _FEW
    while begin < end:
        stop = min(begin + step, end)
        unlike = np.flatnonzero(path[begin:stop] != tokens[begin:stop])
        if unlike.size:
            return begin + int(unlike[0])
        begin, step = stop, 2 * step
    return end
