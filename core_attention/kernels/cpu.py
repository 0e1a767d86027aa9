"""The CPU kernel: core attention as matrix products over tiles, in float32 inside.

Query heads that share a kv head are folded into the rows of one matrix, so K and V are never
repeated. A tile holds all scores of its rows, so softmax is one library call, and the backward
pass recomputes it in place of exp(scores - lse): PyTorch's vectorised softmax is several times
faster on CPU than its exp. The gradients follow FlashAttention-2, section 3.1.

Below, a tile has B tasks of L rows and M keys each, and G query heads per kv head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from core_attention.ca_task import Phase
from core_attention.kernels.cpu_tiles import Tile, tiles
from core_attention.kernels.protocol import BackwardPart, ForwardPart, TaskBatch
from core_attention.score_rule import PLAIN, ScoreRule
from core_attention.shape import AttentionShape


class CpuKernel:
    """Runs CA-tasks on CPU tensors of float32, bfloat16 or float16; equal calls give equal bits.

    Products, softmax and sums are float32 whatever the inputs' dtype. Besides a float32 copy of K
    and V for the narrower dtypes, memory stays bounded by the tile size, not by the task.
    """

    def __init__(self) -> None:
        self._scratch: dict[str, torch.Tensor] = {}

    @property
    def name(self) -> str:
        """See :class:`core_attention.kernels.protocol.Kernel`."""
        return "cpu"

    def check(self, shape: AttentionShape, rule: ScoreRule = PLAIN) -> None:
        """Accepts every valid shape and rule."""

    def warm_up(self, shape: AttentionShape, rule: ScoreRule = PLAIN) -> None:
        """There is nothing to compile."""

    def forward(self, parts: Sequence[ForwardPart], scale: float, rule: ScoreRule = PLAIN) -> None:
        """Writes o and lse of every task of ``parts``."""
        for part in parts:
            k, v = part.k.float(), part.v.float()
            for tile in tiles(part.tasks, part.q.shape[1], k.shape[1], rule):
                self._forward_tile(part, k, v, tile, scale, rule.softcap)

    def backward(
        self, parts: Sequence[BackwardPart], scale: float, rule: ScoreRule = PLAIN
    ) -> None:
        """Writes dq and adds to dk and dv for every task of ``parts``."""
        for part in parts:
            k, v = part.k.float(), part.v.float()
            for tile in tiles(part.tasks, part.q.shape[1], k.shape[1], rule):
                self._backward_tile(part, k, v, tile, scale, rule.softcap)

    def prepare(self, tasks: TaskBatch, phase: Phase) -> None:
        """There is nothing to prepare."""

    def synchronize(self) -> None:
        """Returns at once: CPU calls have finished when they return."""

    def _forward_tile(
        self,
        part: ForwardPart,
        k: torch.Tensor,
        v: torch.Tensor,
        tile: Tile,
        scale: float,
        softcap: float,
    ) -> None:
        q = self._fold("q", part.q, tile).mul_(scale)
        value = _head_major(v, tile)
        weights, lse = self._softmax(q, _head_major(k, tile), tile, softcap)
        o = self._take("o", (*weights.shape[:2], value.shape[2]))
        torch.bmm(weights, value, out=o)
        _unfold(o, part.o, tile)
        _unfold(lse[..., None], part.lse[..., None], tile)

    def _backward_tile(
        self,
        part: BackwardPart,
        k: torch.Tensor,
        v: torch.Tensor,
        tile: Tile,
        scale: float,
        softcap: float,
    ) -> None:
        q = self._fold("q", part.q, tile).mul_(scale)
        do = _without_padding(self._fold("do", part.do, tile), tile)
        delta = _without_padding(self._fold("delta", part.delta[..., None], tile), tile)
        key, value = _head_major(k, tile), _head_major(v, tile)
        weights, _ = self._softmax(q, key, tile, softcap)
        _add_to_keys(part.dv, weights, do, tile)
        # d_scores = weights * (do @ value^T - delta), in the place of the scores.
        d_scores = self._take("scores", weights.shape)
        torch.bmm(do, value.transpose(1, 2), out=d_scores)
        d_scores.sub_(delta).mul_(weights)
        if softcap:
            # What softcap * tanh(score / softcap) leaves of it: 1 - tanh^2.
            tanh = self._take("tanh", weights.shape)
            d_scores.addcmul_(d_scores, tanh.square_(), value=-1)
        _add_to_keys(part.dk, d_scores, q, tile)
        dq = self._take("o", q.shape)
        torch.bmm(d_scores, key, out=dq)
        _unfold(dq.mul_(scale), part.dq, tile)

    def _softmax(
        self, q: torch.Tensor, key: torch.Tensor, tile: Tile, softcap: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention weights ``[B * heads, G * L, M]`` and log-sum-exp ``[B * heads, G * L]`` of
        scaled queries ``[B * heads, G * L, head_dim]``; the weights are scratch. With a softcap,
        the scratch "tanh" has tanh(score / softcap), of hidden keys too."""
        scores = self._take("scores", (*q.shape[:2], key.shape[1]))
        torch.bmm(q, key.transpose(1, 2), out=scores)
        if softcap:
            tanh = self._take("tanh", scores.shape)
            torch.tanh(scores.div_(softcap), out=tanh)
            torch.mul(tanh, softcap, out=scores)
        last_keys = slice(key.shape[1] - tile.hidden.shape[-1], None)
        _by_task(scores, tile)[..., last_keys].masked_fill_(tile.hidden, -math.inf)
        weights = self._take("weights", scores.shape)
        torch.softmax(scores, -1, out=weights)
        # The largest weight is exp(max - lse): two cheap maxima in place of another exp.
        return weights, scores.amax(-1).sub_(weights.amax(-1).log_())

    def _fold(self, name: str, rows: torch.Tensor, tile: Tile) -> torch.Tensor:
        """The tile's part of ``[n_q, num_heads, dim]`` as float32 scratch
        ``[B * heads, G * L, dim]``."""
        chosen = _rows_of(rows[:, tile.heads], tile.q_rows)
        split = _split(_split(chosen, 1, tile.group_size, inner=True), 0, tile.n_tasks)
        split = split.permute(0, 2, 3, 1, 4)
        n_tasks, n_heads, group_size, length, dim = split.shape
        folded = self._take(name, (n_tasks * n_heads, group_size * length, dim))
        folded.view(split.shape).copy_(split)
        return folded

    def _take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Uninitialised float32 scratch, valid until ``name`` is taken again."""
        size = math.prod(shape)
        buffer = self._scratch.get(name)
        if buffer is None or buffer.numel() < size:
            # Kept for later calls, and a tensor of inference mode may not be written to after it.
            with torch.inference_mode(False):
                buffer = self._scratch[name] = torch.empty(size, dtype=torch.float32)
        return buffer[:size].view(*shape)


def _by_task(folded: torch.Tensor, tile: Tile) -> torch.Tensor:
    """``[B * heads, G * L, dim]`` as ``[B, heads, G, L, dim]``."""
    return _split(_split(folded, 1, tile.group_size), 0, tile.n_tasks)


def _split(tensor: torch.Tensor, dim: int, size: int, *, inner: bool = False) -> torch.Tensor:
    """A view with ``dim`` split in two, the first of ``size`` (``inner``: the second)."""
    shape = list(tensor.shape)
    rest = shape[dim] // size
    shape[dim : dim + 1] = [rest, size] if inner else [size, rest]
    return tensor.view(shape)


def _head_major(rows: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The tile's part of K or V as ``[B * heads, M, dim]``; a view if its rows are a slice."""
    chosen = _split(_rows_of(rows[:, tile.kv_heads], tile.k_rows), 0, tile.n_tasks)
    return chosen.transpose(1, 2).flatten(0, 1)


def _rows_of(tensor: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """A view of a slice of rows, or a copy of the rows of an index."""
    # index_select copies whole rows and is several times faster here than tensor[rows].
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def _unfold(folded: torch.Tensor, out: torch.Tensor, tile: Tile) -> None:
    """Writes ``[B * heads, G * L, dim]`` to the tile's rows and heads of ``out``."""
    rows = _by_task(folded, tile).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
    if isinstance(tile.q_rows, slice):
        out[tile.q_rows, tile.heads] = rows
    else:
        # Padding repeats a row of its task: only the row itself may be written.
        kept = tile.is_row.nonzero()[:, 0]
        rows = rows.index_select(0, kept).to(out.dtype)
        out[:, tile.heads].index_copy_(0, tile.q_rows.index_select(0, kept), rows)


def _without_padding(folded: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Zeroes the padding rows in place, so that they add nothing to dk and dv."""
    if not tile.is_row.all():
        is_row = tile.is_row.view(tile.n_tasks, 1, 1, -1, 1)
        _by_task(folded, tile).masked_fill_(~is_row, 0)
    return folded


def _add_to_keys(out: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, tile: Tile) -> None:
    """Adds ``weights^T @ rows`` to the tasks' rows of dk or dv, in their order.

    ``weights`` is ``[B * heads, G * L, M]``, ``rows`` is ``[B * heads, G * L, dim]``.
    """
    if tile.n_tasks == 1:
        begin, length = tile.dk_begin[0], tile.k_lengths[0]
        into = out[begin : begin + length, tile.kv_heads].transpose(0, 1)
        into.baddbmm_(weights.transpose(1, 2), rows)
        return
    sums = _split(torch.bmm(weights.transpose(1, 2), rows), 0, tile.n_tasks)
    if tile.own_keys is not None:
        kept, dk_rows = tile.own_keys
        added = sums.transpose(1, 2).flatten(0, 1).index_select(0, kept)
        added += out.index_select(0, dk_rows)[:, tile.kv_heads]
        out[:, tile.kv_heads].index_copy_(0, dk_rows, added)
        return
    for begin, length, task_sums in zip(tile.dk_begin, tile.k_lengths, sums, strict=True):
        out[begin : begin + length, tile.kv_heads] += task_sums[:, :length].transpose(0, 1)
