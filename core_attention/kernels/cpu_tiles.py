"""The tiles of bounded size into which the CPU kernel cuts a batch of CA-tasks.

A tile is what one round of matrix products computes: a block of query rows of one task with all the
keys they see, or several short tasks padded to one size. Either way a row's scores are complete in
its tile, so its softmax needs no merge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from core_attention.arrays import Int64Array
from core_attention.ca_task import MaskKind
from core_attention.kernels.protocol import TaskBatch
from core_attention.score_rule import PLAIN, ScoreRule

MAX_TILE_SCORES = 2**21
"""Scores (query heads x rows x keys) of a tile: 8 MiB in float32. Two such blocks and the operands
stay near the caches; 2**18 and 2**24 were up to 1.5 times slower at 1K to 16K keys."""

MAX_BLOCK_ROWS = 128
"""Query rows of a block: beyond it, the half of the diagonal that is computed in vain grows."""

MIN_BLOCK_ROWS = 16
"""Fewer rows starve the matrix products, so for very long contexts a tile takes fewer heads first
and then exceeds MAX_TILE_SCORES."""

MAX_PADDED_KEYS = 64
"""Tasks with at most as many keys are padded and batched, which halves the time of hundreds of
them; from 96 keys on a tile of their own is faster than the copies."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Tile:
    """Query rows, the keys they see and the heads to compute: B tasks, L rows and M keys of each.

    Attributes:
        kv_heads: key/value heads.
        group_size: G, query heads per kv head.
        q_rows: rows of q, as a slice of L rows (B = 1) or an index of ``[B * L]``.
        k_rows: rows of k, as a slice of M rows or an index of ``[B * M]``.
        hidden: bool, true where a query does not see a key; ``[B or 1, 1, 1, L, N]`` over the last
            N keys, N <= M. The keys before them are seen by every row.
        is_row: bool ``[B * L]``, false where a row is padding.
        k_lengths: keys of each task; the rest of its M keys are padding.
        dk_begin: first row of dk of each task.
        own_keys: of several tasks that share no row of dk, which of the B * M keys are no padding,
            and their rows of dk; None otherwise.
    """

    kv_heads: slice
    group_size: int
    q_rows: slice | torch.Tensor
    k_rows: slice | torch.Tensor
    hidden: torch.Tensor
    is_row: torch.Tensor
    k_lengths: tuple[int, ...]
    dk_begin: tuple[int, ...]
    own_keys: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def n_tasks(self) -> int:
        """B."""
        return len(self.dk_begin)

    @property
    def heads(self) -> slice:
        """Query heads that share ``kv_heads``."""
        return slice(self.kv_heads.start * self.group_size, self.kv_heads.stop * self.group_size)


def tiles(
    tasks: TaskBatch, num_heads: int, num_heads_kv: int, rule: ScoreRule = PLAIN
) -> Iterator[Tile]:
    """The tiles of ``tasks``, in a fixed order: short tasks by length, then long ones in turn."""
    group_size = num_heads // num_heads_kv
    short = tasks.k_end - tasks.k_begin <= MAX_PADDED_KEYS
    for group in _groups_of_short_tasks(tasks, np.flatnonzero(short), num_heads):
        yield _padded_tile(tasks, group, num_heads_kv, group_size, rule)
    for task in np.flatnonzero(~short):
        yield from _blocks(tasks, int(task), num_heads_kv, group_size, rule)


def _groups_of_short_tasks(
    tasks: TaskBatch, short: Int64Array, num_heads: int
) -> Iterator[Int64Array]:
    """Short tasks of similar key and query lengths, as many together as fit into a tile."""
    keys = (tasks.k_end - tasks.k_begin)[short]
    queries = (tasks.q_end - tasks.q_begin)[short]
    order = np.lexsort((short, queries, keys))
    short, keys, queries = short[order], keys[order], queries[order]
    begin = 0
    while begin < len(short):
        # Keys at most 8 or an eighth more than the shortest's: little padding, few groups.
        end = int(np.searchsorted(keys, max(keys[begin] + 8, keys[begin] * 9 // 8), side="right"))
        widest = int(queries[begin:end].max() * keys[end - 1])
        end = min(end, begin + max(1, MAX_TILE_SCORES // (num_heads * widest)))
        yield short[begin:end]
        begin = end


def _padded_tile(
    tasks: TaskBatch, chosen: Int64Array, num_heads_kv: int, group_size: int, rule: ScoreRule
) -> Tile:
    q_length = (tasks.q_end - tasks.q_begin)[chosen][:, None]
    k_length = (tasks.k_end - tasks.k_begin)[chosen][:, None]
    row, key = np.arange(q_length.max()), np.arange(k_length.max())
    # Padding repeats a task's own last row: rows that belong to no task may hold anything.
    q_rows = tasks.q_begin[chosen][:, None] + np.minimum(row, q_length - 1)
    k_rows = tasks.k_begin[chosen][:, None] + np.minimum(key, k_length - 1)
    own = k_length - q_length + np.minimum(row, q_length - 1)
    last_seen = own if rule.mask is MaskKind.CAUSAL else np.broadcast_to(k_length - 1, own.shape)
    hidden = key > last_seen[:, :, None]
    if rule.window is not None:
        hidden |= key <= last_seen[:, :, None] - rule.window
    return Tile(
        kv_heads=slice(0, num_heads_kv),
        group_size=group_size,
        q_rows=torch.from_numpy(q_rows.reshape(-1)),
        k_rows=torch.from_numpy(k_rows.reshape(-1)),
        hidden=torch.from_numpy(hidden)[:, None, None],
        is_row=torch.from_numpy((row < q_length).reshape(-1)),
        k_lengths=tuple(k_length[:, 0].tolist()),
        dk_begin=tuple(tasks.dk_begin[chosen].tolist()),
        own_keys=_own_keys(tasks.dk_begin[chosen], k_length[:, 0]),
    )


def _own_keys(
    dk_begin: Int64Array, k_length: Int64Array
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``Tile.own_keys`` of a padded tile."""
    in_order = np.argsort(dk_begin)
    if len(dk_begin) == 1 or (np.diff(dk_begin[in_order]) < k_length[in_order][:-1]).any():
        return None
    key = np.arange(k_length.max())
    is_key = key < k_length[:, None]
    rows = (dk_begin[:, None] + key)[is_key]
    return torch.from_numpy(np.flatnonzero(is_key)), torch.from_numpy(rows)


def _blocks(
    tasks: TaskBatch, task: int, num_heads_kv: int, group_size: int, rule: ScoreRule
) -> Iterator[Tile]:
    """Blocks of query rows of one task, from its first row on."""
    q_begin, q_end = int(tasks.q_begin[task]), int(tasks.q_end[task])
    n_keys = int(tasks.k_end[task] - tasks.k_begin[task])
    begin = q_begin
    while begin < q_end:
        # Keys before the block's first own one, from ``first`` on, which some row sees.
        before = n_keys - (q_end - begin)
        first = 0 if rule.window is None else max(0, before - rule.window + 1)
        widest = n_keys if rule.mask is MaskKind.FULL else before - first
        n_heads, n_rows = _block_size(widest, num_heads_kv, group_size)
        end = min(begin + n_rows, q_end)
        last = n_keys if rule.mask is MaskKind.FULL else before + end - begin
        for head in range(0, num_heads_kv, n_heads):
            yield Tile(
                kv_heads=slice(head, min(head + n_heads, num_heads_kv)),
                group_size=group_size,
                q_rows=slice(begin, end),
                k_rows=slice(int(tasks.k_begin[task]) + first, int(tasks.k_begin[task]) + last),
                hidden=_hidden(end - begin, last - first, rule),
                is_row=_ALL_ROWS[: end - begin],
                k_lengths=(last - first,),
                dk_begin=(int(tasks.dk_begin[task]) + first,),
            )
        begin = end


def _hidden(rows: int, keys: int, rule: ScoreRule) -> torch.Tensor:
    """``Tile.hidden`` of a block of queries, the last of which is at the last of ``keys``."""
    if rule.mask is MaskKind.FULL:
        return torch.zeros(1, 1, 1, rows, 0, dtype=torch.bool)
    if rule.window is None or keys <= rule.window:
        return _above_diagonal(rows)
    return _outside_window(rows, keys, rule.window)


def _block_size(keys_before: int, num_heads_kv: int, group_size: int) -> tuple[int, int]:
    """How many kv heads and query rows a block has whose first row follows ``keys_before``."""
    scores_per_row = group_size * (keys_before + MAX_BLOCK_ROWS)
    enough_rows = MAX_BLOCK_ROWS // 2
    n_heads = MAX_TILE_SCORES // (scores_per_row * enough_rows)
    n_heads = max(1, min(n_heads, num_heads_kv))
    n_rows = MAX_TILE_SCORES // (n_heads * scores_per_row) // MIN_BLOCK_ROWS * MIN_BLOCK_ROWS
    return n_heads, max(MIN_BLOCK_ROWS, min(n_rows, MAX_BLOCK_ROWS))


_ALL_ROWS = torch.ones(MAX_BLOCK_ROWS, dtype=torch.bool)


@lru_cache(maxsize=MAX_BLOCK_ROWS)
def _above_diagonal(rows: int) -> torch.Tensor:
    """bool ``[1, 1, 1, rows, rows]``, true where the key is later than the query."""
    return torch.ones(rows, rows, dtype=torch.bool).triu_(1)[None, None, None]


@lru_cache(maxsize=16)
def _outside_window(rows: int, keys: int, window: int) -> torch.Tensor:
    """bool ``[1, 1, 1, rows, keys]``, true where the key is later than the query, or ``window`` or
    more before it."""
    own = torch.arange(keys - rows, keys)[:, None]
    key = torch.arange(keys)
    return ((key > own) | (key <= own - window))[None, None, None]
