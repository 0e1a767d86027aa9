"""The ranks of a job as threads of one process, for tests: each has a session of its own, and every
row crosses UCX (but for rows that stay at home in-place)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from core_attention.manifest import NO_PARENT, RankManifest
from core_attention.score_rule import ScoreRule
from core_attention.shape import AttentionShape
from tests.support.cluster import Cluster, keep_profile
from tests.support.loops import PingPong
from tests.support.reference import reference_attention
from trainer_client import Session, SessionOptions, checkpoint, core_attention
from trainer_client.step.running_step import RunningStep

_names = itertools.count()

Rows = dict[str, torch.Tensor]
"""q, k, v and do, later o, dq, dk and dv, of one (rank, nano-batch, layer), by packed row."""


@dataclass(frozen=True)
class StepResult:
    """What came out of a step on all ranks: rows by (rank, nano-batch, layer)."""

    rows: dict[tuple[int, int, int], Rows]
    running: list[RunningStep]


@dataclass(frozen=True)
class Layer:
    """What a layer asks of core attention; see :func:`trainer_client.core_attention`."""

    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    softcap: float | None = None

    def is_served(self, serve_windows: bool) -> bool:
        return self.chunk is None and (serve_windows or self.window is None)


class Layers(nn.Module):
    """Calls core attention once per layer, on inputs that are given."""

    def __init__(self, kinds: Sequence[Layer], *, checkpointed: bool) -> None:
        super().__init__()
        self._kinds = kinds
        self._checkpointed = checkpointed

    def forward(self, layers: Sequence[Rows]) -> list[torch.Tensor]:
        return [
            checkpoint(self._layer, rows, kind) if self._checkpointed else self._layer(rows, kind)
            for rows, kind in zip(layers, self._kinds, strict=True)
        ]

    def _layer(self, rows: Rows, kind: Layer) -> torch.Tensor:
        return core_attention(
            rows["q"],
            rows["k"],
            rows["v"],
            window=kind.window,
            chunk=kind.chunk,
            softcap=kind.softcap,
            sinks=rows.get("sinks"),
        )


class Team:
    """A job's ranks.

    Args:
        cluster: where.
        n_ranks: ranks.
        shape: of its core attention.
        n_layers: layers that are all served, where ``layers`` are not given.
        layers: what each layer is.
        serve_windows: servers compute those with windows too.
        checkpointed: every layer is an activation checkpoint.
        options: further options of every session.
    """

    def __init__(
        self,
        cluster: Cluster,
        n_ranks: int,
        shape: AttentionShape,
        *,
        n_layers: int = 1,
        layers: Sequence[Layer] = (),
        serve_windows: bool = False,
        n_nano_batches: int = 2,
        interleave: bool = True,
        checkpointed: bool = False,
        **options: Any,
    ) -> None:
        self.shape = shape
        self._layers = layers or [Layer()] * n_layers
        n_layers = len(self._layers)
        self._checkpointed = checkpointed
        self.n_ranks, self.n_layers, self.n_nano_batches = n_ranks, n_layers, n_nano_batches
        self._interleave = interleave
        self._threads = [ThreadPoolExecutor(1) for _ in range(n_ranks)]
        self._step = 0
        self._device = torch.device(options.get("device", "cpu"))
        tick_shape = shape.share(options.get("head_groups", 1))
        keep_profile(cluster.folder, tick_shape, str(self._device))
        job = f"test-{next(_names)}"
        settings: dict[str, Any] = {
            "data_host": "127.0.0.1",
            "one_host": True,
            "profile_dir": cluster.folder,
            "planner": "random",
            "plan_timeout_seconds": 20.0,
            "tick_timeout_seconds": 20.0,
            "probe_bytes": 0,
            **options,
        }
        served = [kind for kind in self._layers if kind.is_served(serve_windows)]
        if serve_windows:
            settings.setdefault("windows", [kind.window or 0 for kind in served])
        opened = [
            thread.submit(
                Session.open,
                SessionOptions(
                    control_plane=cluster.address,
                    job=job,
                    rank=rank,
                    n_ranks=n_ranks,
                    n_layers=len(served),
                    n_nano_batches=n_nano_batches,
                    shape=shape,
                    **settings,
                ),
            )
            for rank, thread in enumerate(self._threads)
        ]
        self.sessions = [future.result(60) for future in opened]

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes every session, side by side: each may wait for a control plane that is gone."""
        with ThreadPoolExecutor(self.n_ranks) as closing:
            list(closing.map(Session.close, self.sessions))
        for thread in self._threads:
            thread.shutdown()

    def run(
        self, manifests: Sequence[RankManifest], *, seed: int = 0, backward: bool = True
    ) -> StepResult:
        """Runs one step on random rows; ``manifests`` get the next step number."""
        futures = self.start(manifests, seed=seed, backward=backward)
        rows: dict[tuple[int, int, int], Rows] = {}
        running = []
        errors = []
        for future in futures:
            try:
                rank_rows, rank_running = future.result(90)
            except Exception as error:
                errors.append(error)
                continue
            rows.update(rank_rows)
            running.append(rank_running)
        if errors:
            raise errors[0]
        return StepResult(rows, running)

    def start(
        self, manifests: Sequence[RankManifest], *, seed: int = 0, backward: bool = True
    ) -> list[Future[tuple[dict[tuple[int, int, int], Rows], RunningStep]]]:
        """Begins what :meth:`run` does: a future for each manifest."""
        submitted = self.submit(manifests, backward=backward)
        return self.start_submitted(submitted, seed=seed, backward=backward)

    def submit(
        self, manifests: Sequence[RankManifest], *, backward: bool = True
    ) -> list[RankManifest]:
        """Hands ``manifests`` in under the next step number; returns them with it."""
        step, self._step = self._step, self._step + 1
        manifests = [RankManifest(step, m.rank, m.nano_batches) for m in manifests]
        for manifest in manifests:
            self.sessions[manifest.rank].submit(manifest, forward_only=not backward)
        return manifests

    def start_submitted(
        self, manifests: Sequence[RankManifest], *, seed: int = 0, backward: bool = True
    ) -> list[Future[tuple[dict[tuple[int, int, int], Rows], RunningStep]]]:
        """:meth:`start` for what :meth:`submit` has returned."""
        return [
            self._threads[manifest.rank].submit(self._run_rank, manifest, seed, backward)
            for manifest in manifests
        ]

    def check(self, manifests: Sequence[RankManifest], *, seed: int = 0) -> StepResult:
        """Runs one step and compares every element with the float64 reference."""
        result = self.run(manifests, seed=seed)
        for layer in range(self.n_layers):
            scale = self.sessions[0].options.scale
            compare(manifests, result.rows, layer, self._layers[layer], self.shape, scale)
        return result

    def _run_rank(
        self, manifest: RankManifest, seed: int, backward: bool
    ) -> tuple[dict[tuple[int, int, int], Rows], RunningStep]:
        session = self.sessions[manifest.rank]
        generator = torch.Generator().manual_seed(seed * 1000 + manifest.rank)
        batches = [
            {
                "layers": [
                    random_rows(self.shape, manifest.tokens(nano), generator, kind, self._device)
                    for kind in self._layers
                ]
            }
            for nano in range(self.n_nano_batches)
        ]
        model = PingPong(
            Layers(self._layers, checkpointed=self._checkpointed),
            interleave=self._interleave,
            takes_no_rows=True,
        )
        with session.step(manifest.step) as running:
            outputs = model(batches)
            if backward:
                flat = [o for nano in outputs for o in nano]
                gradients = [rows["do"] for batch in batches for rows in batch["layers"]]
                # Of a GPU autograd has one thread a process, so one rank that waits there for what
                # another has yet to send, or to send again, would wait for ever.
                with torch.autograd.set_multithreading_enabled(False):
                    torch.autograd.backward(flat, gradients)
        rows = {}
        for nano, batch in enumerate(batches):
            for layer, given in enumerate(batch["layers"]):
                rows[manifest.rank, nano, layer] = computed_rows(
                    given, outputs[nano][layer], backward=backward
                )
        return rows, running


def random_rows(
    shape: AttentionShape,
    n_rows: int,
    generator: torch.Generator,
    kind: Layer,
    device: torch.device,
) -> Rows:
    """What a layer of ``kind`` is called with, and the gradient of its output."""
    dtype = getattr(torch, shape.dtype)

    def random(heads: int, dim: int, grad: bool) -> torch.Tensor:
        values = torch.randn(n_rows, heads, dim, generator=generator)
        return values.to(device, dtype).requires_grad_(grad)

    rows = {
        "q": random(shape.num_heads, shape.head_dim, True),
        "k": random(shape.num_heads_kv, shape.head_dim, True),
        "v": random(shape.num_heads_kv, shape.head_dim_v, True),
        "do": random(shape.num_heads, shape.head_dim_v, False),
    }
    if kind.sinks:
        # The same on all ranks, as weights are.
        sinks = torch.linspace(-1, 2, shape.num_heads)
        rows["sinks"] = sinks.to(device, dtype).requires_grad_()
    return rows


def computed_rows(given: Rows, o: torch.Tensor, *, backward: bool = True) -> Rows:
    """What a layer was called with and gave, with the gradients."""
    rows = {**{name: tensor.detach() for name, tensor in given.items()}, "o": o.detach()}
    if backward:
        for name in given.keys() - {"do"}:
            gradient = given[name].grad
            assert gradient is not None, name
            rows[f"d{name}"] = gradient
    return rows


def compare(
    manifests: Sequence[RankManifest],
    rows_of: Mapping[tuple[int, int, int], Rows],
    layer: int,
    kind: Layer,
    shape: AttentionShape,
    scale: float,
) -> None:
    """Compares every element of a layer with the float64 reference.

    Args:
        manifests: of all ranks.
        rows_of: :func:`computed_rows` by (rank, nano-batch, layer).
        layer, kind: which layer, and what it is.
        shape: of the job.
        scale: multiplies q.k before the softmax.
    """
    rule = ScoreRule(
        mask=shape.mask,
        window=kind.window,
        softcap=shape.softcap if kind.softcap is None else kind.softcap,
    )
    sinks = rows_of[0, 0, layer].get("sinks")
    dsinks = []
    documents = _document_pieces(manifests)
    wanted: dict[tuple[int, int], Rows] = {
        (rank, nano): {
            name: torch.zeros_like(rows[name], dtype=torch.float64, device="cpu")
            for name in ("o", "dq", "dk", "dv")
        }
        for (rank, nano, at), rows in rows_of.items()
        if at == layer
    }
    for above, own in documents:
        gathered = {
            name: torch.cat([rows_of[r, n, layer][name][at].cpu() for r, n, at in (*above, *own)])
            for name in ("q", "k", "v", "do")
        }
        # What is read of other documents has outputs of its own there.
        gathered["do"][: sum(at.stop - at.start for _, _, at in above)] = 0
        expected = reference_attention(
            gathered["q"],
            gathered["k"],
            gathered["v"],
            _chunks(len(gathered["q"]), kind.chunk),
            scale,
            gathered["do"],
            rule,
            sinks,
        )
        begin = 0
        for piece in (*above, *own):
            rank, nano, at = piece
            its = slice(begin, begin := begin + at.stop - at.start)
            for name in ("o", "dq", "dk", "dv") if piece in own else ("dk", "dv"):
                wanted[rank, nano][name][at] += getattr(expected, name)[its]
        if expected.dsinks is not None:
            dsinks.append(expected.dsinks)
    for _, own in documents:
        for name in ("o", "dq", "dk", "dv"):
            found, expected_rows = (
                torch.cat([of[(r, n, *key)][name][at].cpu() for r, n, at in own])
                for of, key in ((rows_of, (layer,)), (wanted, ()))
            )
            assert_close(name, found, expected_rows)
    if dsinks:
        ranks = [rows["dsinks"] for (_, _, at), rows in rows_of.items() if at == layer]
        assert_close("dsinks", torch.stack(ranks).sum(0).cpu(), torch.stack(dsinks).sum(0))


def _chunks(length: int, chunk: int | None) -> list[int]:
    """A document's length, or its chunks'."""
    if chunk is None:
        return [length]
    return [min(chunk, length - at) for at in range(0, length, chunk)]


def assert_close(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares element by element, in units of the largest expected element, or of the unit-sized
    terms that cancel where the expected gradient is zero (a document of one token).

    float32: sums of up to a few thousand products, each rounded to 6e-8, err by 1e-6 at most in
    practice; ten times that is allowed. bfloat16: inputs and results are rounded to 8 bits (4e-3),
    the backward pass sees the rounded O through delta, and kernels on a GPU round the weights and
    their gradients for the matrix products; eight roundings are allowed.
    """
    tolerance = 1e-5 if result.dtype == torch.float32 else 3.2e-2
    scale = max(float(expected.abs().max()), 1.0)
    error = float((result.double() - expected).abs().max()) / scale
    assert error <= tolerance, f"{name} differs by {error:.2e} of its largest element"


Piece = tuple[int, int, slice]
"""Rank, nano-batch and packed rows."""


def _document_pieces(manifests: Sequence[RankManifest]) -> list[tuple[list[Piece], list[Piece]]]:
    """By document: the rows before its own, which its path has, and its own, by position."""
    pieces: dict[int, list[tuple[int, int, int, slice]]] = {}
    parents: dict[int, tuple[int, int]] = {}
    for manifest in manifests:
        for nano_batch, segments in enumerate(manifest.nano_batches):
            row = 0
            for segment in segments:
                piece = (
                    segment.offset,
                    manifest.rank,
                    nano_batch,
                    slice(row, row + segment.length),
                )
                pieces.setdefault(segment.document_id, []).append(piece)
                parents[segment.document_id] = segment.document_parent, segment.document_offset
                row += segment.length

    def path(document: int, end: int) -> list[Piece]:
        """The rows of positions [0, end)."""
        if document == NO_PARENT:
            return []
        parent, begin = parents[document]
        its = sorted(pieces[document], key=lambda piece: piece[0])
        cut = [
            (rank, nano, slice(rows.start, min(rows.stop, rows.start + end - offset)))
            for offset, rank, nano, rows in its
            if offset < end
        ]
        return path(parent, min(begin, end)) + cut

    return [
        (path(*parents[document]), [piece[1:] for piece in sorted(its, key=lambda p: p[0])])
        for document, its in pieces.items()
    ]
