"""Corpora: documents of bytes, one token a byte; every rank opens the same one by itself."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from core_attention.arrays import Int64Array
from distca.errors import DataError

VOCABULARY_SIZE = 256

_SNIFF_BYTES = 4096
"""How much of a file is searched for a zero byte, which no text has."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents in a fixed order, none of them empty.

    Attributes:
        source: where they are from, for people.
        lengths: ``[n_documents]`` tokens of each, at least 1.
        read: bytes ``[begin, end)`` of a document.
    """

    source: str
    lengths: Int64Array
    read: Callable[[int, int, int], bytes]

    def tokens(self, document: int, begin: int, end: int) -> Int64Array:
        """Tokens ``[begin, end)`` of a document."""
        data = self.read(document, begin, end)
        if len(data) != end - begin:
            raise DataError(
                f"{self.source}: document {document} had {self.lengths[document]} bytes when "
                f"training began and has fewer than {end} now; leave the data in place"
            )
        return np.frombuffer(data, dtype=np.uint8).astype(np.int64)

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that differ between corpora of different document lengths."""
        return hashlib.sha256(self.lengths.astype("<i8").tobytes()).hexdigest()[:16]

    def __str__(self) -> str:
        tokens = int(self.lengths.sum())
        return f"{self.source}: {len(self.lengths):,} documents, {tokens:,} tokens"


def open_corpus(path: Path | None, text_field: str) -> Corpus:
    """The corpus at ``path``.

    Args:
        path: a folder (every text file below it is a document), a ``.jsonl`` or ``.parquet``
            file, or None for the sources of Python's standard library.
        text_field: JSONL field or Parquet column with the text.

    Raises:
        DataError: nothing is there, it cannot be read, or holds no document.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        installed = {"site-packages", "dist-packages"}
        paths = [
            file for file in sorted(root.rglob("*.py")) if not installed & {*_parts(file, root)}
        ]
        return _of_files("Python's standard library", paths)
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file()]
        shown = [file for file in files if not any(p.startswith(".") for p in _parts(file, path))]
        return _of_files(str(path), [file for file in shown if _looks_like_text(file)])
    readers = {".jsonl": _jsonl_texts, ".parquet": _parquet_texts}
    if not path.exists() or path.suffix not in readers:
        what = f"is a {path.suffix} file" if path.exists() else "does not exist"
        raise DataError(
            f"data path {path} {what}; give a folder of text files, a .jsonl or a .parquet file"
        )
    return _of_texts(str(path), [*readers[path.suffix](path, text_field)])


def _parts(file: Path, root: Path) -> Sequence[str]:
    return file.relative_to(root).parts


def _looks_like_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(_SNIFF_BYTES)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _of_files(source: str, paths: Sequence[Path]) -> Corpus:
    """One document a file, read when needed; files without a byte are left out."""
    sizes = [path.stat().st_size for path in paths]
    kept = [path for path, size in zip(paths, sizes, strict=True) if size]

    def read(document: int, begin: int, end: int) -> bytes:
        try:
            with kept[document].open("rb") as file:
                file.seek(begin)
                return file.read(end - begin)
        except OSError as error:
            raise DataError(f"{kept[document]}: {error.strerror}; leave it in place") from error

    return _checked(source, [size for size in sizes if size], read)


def _of_texts(source: str, texts: Sequence[str]) -> Corpus:
    """Documents in memory; empty ones are left out. A lone surrogate, which scraped JSON may hold
    and UTF-8 does not have, is three bytes, as in
    :func:`distca.apps.simulator.length_files.read_lengths`."""
    kept = [text.encode(errors="surrogatepass") for text in texts if text]
    return _checked(source, list(map(len, kept)), lambda n, begin, end: kept[n][begin:end])


def _checked(source: str, lengths: Sequence[int], read: Callable[[int, int, int], bytes]) -> Corpus:
    if not lengths:
        raise DataError(f"{source} holds no text that is not empty; give at least one")
    return Corpus(source, np.array(lengths, dtype=np.int64), read)


def _jsonl_texts(path: Path, field: str) -> Iterator[str]:
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _text(path, number, json.loads(line)[field])
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{path}:{number}: no object with field {field!r}; choose one with --text-field"
        ) from error
    # The latter for lists in lists without end.
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}:{number}: no JSON of UTF-8: {error}") from error


def _parquet_texts(path: Path, column: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
        if column not in names:
            raise DataError(
                f"{path}: no column {column!r}, only {names}; choose one with --text-field"
            )
        texts = pq.read_table(path, columns=[column])[column].to_pylist()
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    for number, text in enumerate(texts, start=1):
        yield _text(path, number, text or "")


def _text(path: Path, number: int, value: object) -> str:
    if not isinstance(value, str):
        raise DataError(f"{path}:{number} holds {type(value).__name__}, not text")
    return value
