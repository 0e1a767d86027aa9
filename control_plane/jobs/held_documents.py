"""The documents that a rank holds in a step, to compare with those of others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from core_attention.manifest import RankManifest

SHOWN = 8
"""How many of a list errors show."""


def held_documents(manifest: RankManifest) -> bytes:
    """Equal for ranks that hold the same; ids of documents are each rank's own, and left out."""
    columns = manifest.columns._asdict()
    return b"".join(column.tobytes() for name, column in columns.items() if name != "document_id")


def shown_lengths(manifest: RankManifest) -> str:
    """Describe the documents of a rank, without the end of a long list."""
    lengths: Sequence[int] = [s.length for s in chain.from_iterable(manifest.nano_batches)]
    more = f" and {len(lengths) - SHOWN} more" if len(lengths) > SHOWN else ""
    return f"segments of lengths {list(lengths[:SHOWN])}{more}"
