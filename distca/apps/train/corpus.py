"""Corpora: text files as documents of bytes, one token a byte; every rank opens the same one."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from core_attention.arrays import Int64Array
from distca.errors import DistcaError

VOCABULARY_SIZE = 256

_SNIFF_BYTES = 4096
"""How much of a file is searched for a zero byte, which no text has."""


class Corpus:
    """One document a file, read when needed; files without a byte are left out.

    Args:
        source: where the files are from, for people.
        files: of text, in order.
    """

    def __init__(self, source: str, files: Iterable[Path]) -> None:
        sizes = {file: file.stat().st_size for file in files}
        self._files = [file for file, size in sizes.items() if size]
        self._source = source
        self.lengths: Int64Array = np.array([sizes[file] for file in self._files], dtype=np.int64)
        """Tokens of each document."""
        if not self._files:
            raise DistcaError(
                f"{source} holds no text file that is not empty; put at least one there"
            )

    def tokens(self, document: int, begin: int, end: int) -> Int64Array:
        """Tokens ``[begin, end)`` of a document."""
        path = self._files[document]
        try:
            with path.open("rb") as file:
                file.seek(begin)
                data = file.read(end - begin)
        except OSError as error:
            raise DistcaError(
                f"{path}: {error.strerror}; leave it in place while training"
            ) from error
        if len(data) != end - begin:
            raise DistcaError(
                f"{path} had {self.lengths[document]} bytes when training began and has fewer than "
                f"{end} now; leave it in place while training"
            )
        return np.frombuffer(data, dtype=np.uint8).astype(np.int64)

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that differ between corpora of different document lengths."""
        return hashlib.sha256(self.lengths.astype("<i8").tobytes()).hexdigest()[:16]

    def __str__(self) -> str:
        tokens = int(self.lengths.sum())
        return f"{self._source}: {len(self.lengths):,} documents, {tokens:,} tokens"


def open_corpus(folder: Path | None) -> Corpus:
    """The text files in ``folder`` and below it, without hidden and binary ones; None: the sources
    of Python's standard library.

    Raises:
        DistcaError: there is no such folder, or no text in it.
    """
    if folder is None:
        root, installed = Path(sysconfig.get_path("stdlib")), {"site-packages", "dist-packages"}
        sources = sorted(root.rglob("*.py"))
        own = [each for each in sources if not installed & {*each.relative_to(root).parts}]
        return Corpus("Python's standard library", own)
    if not folder.is_dir():
        raise DistcaError(f"data path {folder} is no folder; give one that holds text files")
    files = [each for each in sorted(folder.rglob("*")) if each.is_file()]
    return Corpus(str(folder), [each for each in files if _is_shown_text(each, folder)])


def _is_shown_text(path: Path, root: Path) -> bool:
    if any(part.startswith(".") for part in path.relative_to(root).parts):
        return False
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(_SNIFF_BYTES)
    except OSError as error:
        raise DistcaError(f"{path}: {error.strerror}") from error
