"""Batches of a data loader, whose manifests are submitted some steps ahead of their use."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from core_attention.errors import ManifestError
from core_attention.manifest import RankManifest
from distca.contract.checks import check_count
from trainer_client.loops.held_batch import own_copy
from trainer_client.session import Session
from trainer_client.turns.manifests import (
    manifest_from_cu_seqlens,
    manifest_from_position_ids,
    manifest_of_row,
)

NanoBatches = Sequence[Mapping[str, Any]]
"""A step: for each nano-batch, the model's arguments."""

Batch = TypeVar("Batch", NanoBatches, Mapping[str, Any])


def submit_ahead(
    session: Session, loader: Iterable[Batch], *, ahead: int = 3, forward_only: bool = False
) -> Iterator[tuple[int, Batch]]:
    """The steps of ``loader``, each submitted while earlier ones run, so that its plan is ready.

    Steps are numbered on from the last one submitted, so a session may run several loaders one
    after another, or one amid another, such as an evaluation between two training steps: those of
    the outer one that are submitted already are submitted again after it. All ranks must give
    loaders of equal length.

    Args:
        session: of this rank.
        loader: each item is a step of this rank: for each nano-batch the model's arguments, with
            ``position_ids`` that restart at 0 for each document, or ``cu_seq_lens_q``. Or the
            arguments of one whole row, or of a batch that is padded with an
            ``attention_mask``, which is split inside the model: see
            :func:`trainer_client.models.whole_rows.turns_inside`.
        ahead: how many steps beyond the yielded one are submitted.
        forward_only: the steps have no backward pass (evaluation).

    Yields:
        The number of a step, for ``session.step``, and a copy of what the loader gave for it: it
        may reuse its memory.

    Raises:
        ManifestError: a nano-batch does not say where its documents begin.
        ValueError: ``ahead`` is no integer of 0 or more, or a step has another number of
            nano-batches than the job.
        SessionClosed: the job ended.
    """
    check_count("ahead", ahead)
    submitted: deque[tuple[int, Batch]] = deque()

    def submit(batches: Iterable[Batch]) -> None:
        for batch in batches:
            step = session.next_step
            session.submit(manifest_of_step(session, step, batch), forward_only=forward_only)
            submitted.append((step, batch))

    def submit_what_was_passed_over() -> None:
        if submitted and session.is_past(submitted[0][0]):
            passed = [batch for _, batch in submitted]
            submitted.clear()
            submit(passed)

    source, last = iter(loader), LastBatch()
    while True:
        while len(submitted) <= ahead and last.may_fetch:
            fetched = last.fetch(source)
            submit_what_was_passed_over()
            submit(fetched)
        submit_what_was_passed_over()
        if not submitted:
            return
        given = submitted.popleft()
        last.hand_out(is_last=not submitted)
        yield given
        last.used()


class LastBatch:
    """Batches of a loader that are fetched ahead, and which of them is the last one.

    Loaders of accelerate say that a batch is the last one when they give it: for its gradient
    accumulation and metrics, it shall be so when it is trained on. Nothing is fetched beyond it
    before, which would end the loader.
    """

    def __init__(self) -> None:
        self._is_over = self._is_out = False
        self._loader: Any = None

    @property
    def may_fetch(self) -> bool:
        """Return whether there may be more batches, and the last one of a loader is not ahead."""
        return not self._is_over and self._loader is None

    def fetch(self, source: Iterator[Batch]) -> list[Batch]:
        """A copy of the next batch; none if there are no more."""
        with _earlier_ends_aside():
            try:
                batch = own_copy(next(source))
            except StopIteration:
                self._is_over = True
                return []
            self._loader = _active_loader_at_its_end()
        if self._loader is not None:
            self._loader.end_of_dataloader = False
        return [batch]

    def hand_out(self, *, is_last: bool) -> None:
        """A batch is about to be trained on; ``is_last`` of those that were fetched."""
        if is_last and self._loader is not None:
            self._loader.end_of_dataloader = self._is_out = True

    def used(self) -> None:
        """The batch that was handed out has been trained on."""
        if self._is_out:
            self._loader.end_of_dataloader = self._is_out = False
            self._loader = None


def _active_loader_at_its_end() -> Any:
    """The loader of accelerate that is iterated over, if it has given its last batch."""
    loader = _loaders()[-1]
    return loader if getattr(loader, "end_of_dataloader", False) else None


@contextmanager
def _earlier_ends_aside() -> Iterator[None]:
    """Set loaders that stand at their end aside: within, one is there only if it comes there."""
    at_end = [each for each in _loaders() if getattr(each, "end_of_dataloader", False)]
    for loader in at_end:
        loader.end_of_dataloader = None
    try:
        yield
    finally:
        for loader in at_end:
            if loader.end_of_dataloader is None:
                loader.end_of_dataloader = True


def _loaders() -> list[Any]:
    """Those of accelerate that are iterated over, the innermost one last; None stands for none."""
    accelerate = sys.modules.get("accelerate.state")
    return [None] if accelerate is None else accelerate.GradientState().dataloader_references


def manifest_of_step(
    session: Session, step: int, nano_batches: NanoBatches | Mapping[str, Any]
) -> RankManifest:
    """The manifest that this rank submits for a step: nano-batches, or a whole row that is split
    into them."""

    rank = session.options.rank
    if isinstance(nano_batches, Mapping):
        return manifest_of_row(
            step,
            rank,
            nano_batches,
            session.options.n_nano_batches,
            cut_documents=session.options.cut_documents,
        )
    for name, make in (
        ("position_ids", manifest_from_position_ids),
        ("cu_seq_lens_q", manifest_from_cu_seqlens),
    ):
        if all(name in batch for batch in nano_batches):
            return make(step, rank, [batch[name] for batch in nano_batches])
    raise ManifestError(
        f"step {step}: the nano-batches hold {[sorted(batch) for batch in nano_batches]}; give "
        "each position_ids that restart at 0 for each document, or cu_seq_lens_q"
    )
