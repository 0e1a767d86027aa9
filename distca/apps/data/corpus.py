"""Corpora: documents of bytes, one token a byte (vocabulary 256).

Every rank opens the same corpus by itself; :func:`fingerprint` shows whether they agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from core_attention.arrays import Int64Array
from distca.errors import DataError

VOCABULARY_SIZE = 256

Tokens = NDArray[np.uint8]


class Corpus(Protocol):
    """Documents in a fixed order, none of them empty."""

    @property
    def source(self) -> str:
        """The origin of the documents, for people."""

    @property
    def lengths(self) -> Int64Array:
        """``[n_documents]`` tokens of each document, at least 1."""

    def name(self, document: int) -> str:
        """Names a document in logs and errors."""

    def tokens(self, document: int, begin: int, end: int) -> Tokens:
        """Tokens ``[begin, end)`` of a document, as uint8."""


def fingerprint(corpus: Corpus) -> str:
    """Sixteen hexadecimal digits that differ between corpora of different document lengths."""
    return hashlib.sha256(corpus.lengths.astype("<i8").tobytes()).hexdigest()[:16]


class FileCorpus:
    """One document a file, read when needed; files without a byte are left out.

    Args:
        source: where the files come from, for people.
        root: names are relative to it.
        paths: the files, in order.
    """

    def __init__(self, source: str, root: Path, paths: Sequence[Path]) -> None:
        sizes = [path.stat().st_size for path in paths]
        self._root = root
        self._paths = [path for path, size in zip(paths, sizes, strict=True) if size]
        self._lengths = np.array([size for size in sizes if size], dtype=np.int64)
        self._source = source
        if not self._paths:
            raise DataError(f"{source}: all {len(paths)} files are empty; give at least one text")

    @property
    def source(self) -> str:
        return self._source

    @property
    def lengths(self) -> Int64Array:
        return self._lengths

    def name(self, document: int) -> str:
        return self._paths[document].relative_to(self._root).as_posix()

    def tokens(self, document: int, begin: int, end: int) -> Tokens:
        path = self._paths[document]
        try:
            with path.open("rb") as file:
                file.seek(begin)
                data = file.read(end - begin)
        except OSError as error:
            raise DataError(
                f"{path}: {error.strerror}; leave the data in place while training"
            ) from error
        if len(data) != end - begin:
            raise DataError(
                f"{path} had {self._lengths[document]} bytes when training began and has fewer "
                f"than {end} now; leave the data in place while training"
            )
        return np.frombuffer(data, dtype=np.uint8)


class MemoryCorpus:
    """Documents that are held in memory, one after another in one array.

    Args:
        source: where they come from, for people.
        texts: the documents; empty ones are left out. A lone surrogate, which scraped JSON may
            hold and UTF-8 does not have, is three bytes, as in
            :func:`distca.apps.simulator.length_files.read_lengths`.
    """

    def __init__(self, source: str, texts: Sequence[str]) -> None:
        encoded = [text.encode(errors="surrogatepass") for text in texts]
        kept = [(index, data) for index, data in enumerate(encoded) if data]
        if not kept:
            raise DataError(f"{source}: all {len(texts)} documents are empty")
        self._source = source
        self._indices = [index for index, _ in kept]
        self._lengths = np.array([len(data) for _, data in kept], dtype=np.int64)
        self._begin = np.cumsum(self._lengths) - self._lengths
        self._tokens = np.frombuffer(b"".join(data for _, data in kept), dtype=np.uint8)

    @property
    def source(self) -> str:
        return self._source

    @property
    def lengths(self) -> Int64Array:
        return self._lengths

    def name(self, document: int) -> str:
        return f"document {self._indices[document]}"

    def tokens(self, document: int, begin: int, end: int) -> Tokens:
        first = self._begin[document]
        return self._tokens[first + begin : first + end]
