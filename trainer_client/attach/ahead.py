"""The documents of batches that a loader has given, before their forwards: a hint."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from core_attention.errors import ManifestError
from trainer_client.attach.call_rows import CallRows
from trainer_client.turns.branches import RowDocuments

MAX_FETCHED = 1024
"""Batches that are remembered; loops fetch the microbatches of one optimizer step at a time."""

Batch = TypeVar("Batch")


class Fetched:
    """The documents of batches that have been fetched, oldest first.

    Attributes:
        watchers: called when a batch is fetched.
    """

    def __init__(self) -> None:
        self._documents: deque[RowDocuments] = deque(maxlen=MAX_FETCHED)
        self.watchers: list[Callable[[], None]] = []

    @property
    def next(self) -> RowDocuments | None:
        """Those of the oldest batch without a forward; None if there is none."""
        return self._documents[0] if self._documents else None

    def put(self, documents: RowDocuments) -> None:
        """A batch has been fetched."""
        self._documents.append(documents)
        for watcher in list(self.watchers):
            watcher()

    def take(self, documents: RowDocuments) -> bool:
        """A forward has such documents: it is that of the oldest such batch, and those before it
        have been left out. Returns whether there is one."""
        is_there = documents in self._documents
        while is_there and self._documents.popleft() != documents:
            pass
        return is_there


fetched = Fetched()


def ahead(
    loader: Iterable[Batch], *, lengths: Callable[[Batch], list[int]] | None = None
) -> Iterator[Batch]:
    """Yields the batches of ``loader`` as they are, and notes the lengths of their documents: a
    batch is planned from then on, not from its forward on.

    Only a hint. Batches may be left out, used twice or run in another order; no tensor is held.
    It helps where batches are fetched before they are due, and where DDP or FSDP2 says which
    forward is the last before gradients are reduced.

    Args:
        loader: its batches are arguments of the decoder by name, on the CPU.
        lengths: reads them from a batch of another kind; in packed order.
    """
    for batch in loader:
        given = None if lengths is None else RowDocuments([*map(int, lengths(batch))])
        fetched.put(given or _documents_of(batch))
        yield batch


def _documents_of(batch: Any) -> RowDocuments:
    if not isinstance(batch, Mapping):
        raise ManifestError(
            f"the loader gave a {type(batch).__name__}; give ahead(loader, lengths=...) a function "
            "that reads the lengths of its documents"
        )
    return CallRows.of(batch).documents
