"""Opens a corpus from where the user says it is: a folder, JSONL, Parquet or the default."""

from __future__ import annotations

import json
import logging
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from distca.apps.data.corpus import Corpus, FileCorpus, MemoryCorpus
from distca.errors import DataError

logger = logging.getLogger(__name__)

_SNIFF_BYTES = 4096
"""How much of a file is searched for a zero byte, which no text has."""


def open_corpus(path: Path | None, text_field: str) -> Corpus:
    """The corpus at ``path``.

    Args:
        path: a folder (every text file below it is a document), a ``.jsonl`` or ``.parquet``
            file, or None for the sources of Python's standard library.
        text_field: JSONL field or Parquet column with the text.

    Raises:
        DataError: nothing is there, it is of no known kind, the field is missing or holds no
            text, or there is no document.
    """
    if path is None:
        return _standard_library()
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        raise DataError(
            f"data path {path} does not exist; give a folder of text files, a .jsonl or a "
            ".parquet file"
        )
    match path.suffix.lower():
        case ".jsonl":
            return MemoryCorpus(str(path), _jsonl_texts(path, text_field))
        case ".parquet":
            return MemoryCorpus(str(path), _parquet_texts(path, text_field))
        case suffix:
            raise DataError(
                f"data path {path} ends in {suffix!r}; valid are a folder of text files, .jsonl "
                "and .parquet"
            )


def _standard_library() -> FileCorpus:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts)
    ]
    if not paths:
        raise DataError(
            f"this Python has no standard-library sources below {root}; give --data a folder of "
            "text files"
        )
    return FileCorpus("Python's standard library", root, paths)


def _folder(root: Path) -> FileCorpus:
    files = [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    if not files:
        raise DataError(f"data folder {root} holds no file; put one text file a document there")
    texts = [path for path in files if _looks_like_text(path)]
    if len(texts) < len(files):
        logger.warning("%s: left out %d files that are no text", root, len(files) - len(texts))
    if not texts:
        raise DataError(
            f"data folder {root} holds no text file among its {len(files)} files; a single "
            ".parquet or .jsonl file is given by its own path"
        )
    return FileCorpus(str(root), root, texts)


def _looks_like_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(_SNIFF_BYTES)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _jsonl_texts(path: Path, field: str) -> Sequence[str]:
    texts = []
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    texts.append(_json_text(f"{path}:{number}", line, field))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error
    if not texts:
        raise DataError(f"{path} holds no line; a .jsonl file has one JSON object a line")
    return texts


def _json_text(where: str, line: str, field: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: this is no JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or lists in lists without end.
        raise DataError(f"{where}: JSON that cannot be read: {error}; leave it out") from error
    if not isinstance(record, dict) or field not in record:
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{where}: no field {field!r}, only {found}; choose one with --text-field")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} holds {type(text).__name__}, not text")
    return text


def _parquet_texts(path: Path, column: str) -> Sequence[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
        if column not in schema.names:
            raise DataError(
                f"{path}: no column {column!r}, only {schema.names}; choose one with --text-field"
            )
        kind = schema.field(column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(f"{path}: column {column!r} holds {kind}, not text")
        texts = [text or "" for text in pq.read_table(path, columns=[column])[column].to_pylist()]
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    if not texts:
        raise DataError(f"{path} holds no row")
    return texts
