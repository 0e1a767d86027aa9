"""Batches of a data loader, whose manifests are submitted some steps ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from core_attention.errors import ManifestError
from core_attention.manifest import RankManifest
from trainer_client.session import Session
from trainer_client.step.manifests import manifest_from_cu_seqlens, manifest_from_position_ids

NanoBatches = Sequence[Mapping[str, Any]]
"""A step: for each nano-batch, the model's arguments."""


def submit_ahead(
    session: Session, loader: Iterable[NanoBatches], *, ahead: int = 3, forward_only: bool = False
) -> Iterator[tuple[int, NanoBatches]]:
    """The steps of ``loader``, each submitted while earlier ones run, so that its plan is ready.

    Steps are numbered on from the last one submitted, so a session may run several loaders one
    after another. All ranks must give loaders of equal length.

    Args:
        session: of this rank.
        loader: each item is a step of this rank: for each nano-batch the model's arguments, with
            ``position_ids`` that restart at 0 for each document, or ``cu_seq_lens_q``.
        ahead: how many steps beyond the yielded one are submitted.
        forward_only: the steps have no backward pass (evaluation).

    Yields:
        The number of a step, for ``session.step``, and its nano-batches.

    Raises:
        ManifestError: a nano-batch does not say where its documents begin.
        ValueError: ``ahead`` is negative, or a step has another number of nano-batches than the
            job.
        SessionClosed: the job ended.
    """
    if ahead < 0:
        raise ValueError(f"ahead is {ahead}; it must be 0 or more")
    submitted: deque[tuple[int, NanoBatches]] = deque()
    for nano_batches in loader:
        step = session.next_step
        session.submit(_manifest(session, step, nano_batches), forward_only=forward_only)
        submitted.append((step, nano_batches))
        if len(submitted) > ahead:
            yield submitted.popleft()
    yield from submitted


def _manifest(session: Session, step: int, nano_batches: NanoBatches) -> RankManifest:
    rank = session.options.rank
    for name, make in (
        ("position_ids", manifest_from_position_ids),
        ("cu_seq_lens_q", manifest_from_cu_seqlens),
    ):
        if all(name in batch for batch in nano_batches):
            return make(step, rank, [batch[name] for batch in nano_batches])
    raise ManifestError(
        f"step {step}: the nano-batches hold {[sorted(batch) for batch in nano_batches]}; each "
        "needs position_ids that restart at 0 for each document, as transformers' "
        "DataCollatorWithFlattening gives, or cu_seq_lens_q"
    )
