"""Document lengths from what a user has: a text file, JSONL, Parquet or a tokenized data set.

Where a file holds texts and no lengths, tokens are estimated from their UTF-8 bytes. A
byte-order mark before a text is left out.
"""

from __future__ import annotations

import json
import math
import reprlib
import struct
import tokenize
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core_attention.arrays import Int64Array
from core_attention.manifest import MAX_DOCUMENT_TOKENS
from distca.apps.simulator.packing import checked_lengths

LENGTH_FIELDS = ("length", "n_tokens", "num_tokens", "token_count", "input_ids", "tokens", "text")
"""Fields and columns looked for when none is named, in this order."""

LEAST_BYTES_PER_TOKEN = 0.01
"""Far below what any tokenizer has; lengths that are estimated with it are still int64."""

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<QBQQ")
"""Version, code of the token dtype, sequences, document bounds."""


@dataclass(frozen=True)
class FileLengths:
    """The lengths in a file.

    Attributes:
        lengths: ``[n_documents]`` tokens.
        estimated: whether they were estimated from texts.
    """

    lengths: Int64Array
    estimated: bool


def read_lengths(path: Path, field: str | None = None, bytes_per_token: float = 4.0) -> FileLengths:
    """The document lengths in ``path``, by its ending.

    ========================  ==================================================================
    ``.jsonl``                ``field`` of each line: a number, a list of token ids, or a text
    ``.parquet``              column ``field``, likewise
    ``.npy``                  one-dimensional: lengths, or, if it begins with 0, the bounds of
                              the documents in a token stream
    ``.idx``                  index of a Megatron-LM data set
    anything else             text: one number a line
    ========================  ==================================================================

    Args:
        path: the file.
        field: JSONL field or Parquet column; None is the first of :data:`LENGTH_FIELDS` there.
        bytes_per_token: by which UTF-8 bytes of texts are divided, at least
            :data:`LEAST_BYTES_PER_TOKEN`. A lone surrogate counts as three bytes.
    """
    if not (math.isfinite(bytes_per_token) and bytes_per_token >= LEAST_BYTES_PER_TOKEN):
        raise ValueError(
            f"bytes_per_token is {bytes_per_token}; it must be a finite number of "
            f"{LEAST_BYTES_PER_TOKEN} or more"
        )
    if not path.is_file():
        raise ValueError(f"lengths file {path} does not exist, or is no file")
    readers: dict[str, Callable[[], FileLengths]] = {
        ".jsonl": lambda: _from_values(_jsonl_values(path, field), bytes_per_token),
        ".parquet": lambda: _from_parquet(path, field, bytes_per_token),
        ".npy": lambda: FileLengths(_numpy_lengths(path), False),
        ".idx": lambda: FileLengths(_megatron_lengths(path), False),
    }
    if field is not None and path.suffix.lower() not in (".jsonl", ".parquet"):
        raise ValueError(
            f"field is {field!r}, and lengths file {path} has none; only .jsonl and .parquet have: "
            "leave field out, or give such a file"
        )
    read = readers.get(path.suffix.lower(), lambda: FileLengths(_text_lengths(path), False))
    try:
        found = read()
    except OSError as error:
        raise ValueError(f"lengths file {path} cannot be read: {error}") from error
    return FileLengths(checked_lengths(found.lengths, str(path)), found.estimated)


def _text_lengths(path: Path) -> Int64Array:
    lengths = []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"lengths file {path} is no text ({error.reason}); valid are text with one number a "
            "line, .jsonl, .parquet, .npy and .idx"
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            length = int(line)
        except ValueError:
            raise ValueError(
                f"{path}, line {number}: {line.strip()[:40]!r} is no integer; a text file has one "
                "length a line"
            ) from None
        lengths.append(_not_beyond(length, f"{path}, line {number}"))
    return np.array(lengths, dtype=np.int64)


def _not_beyond(length: int, where: str) -> int:
    """``length``, which int64 holds; whether it is positive is checked for the whole file."""
    if abs(length) > MAX_DOCUMENT_TOKENS:
        raise ValueError(
            f"{where}: length {reprlib.repr(length)} is out of range; a document has 1 to "
            f"{MAX_DOCUMENT_TOKENS} tokens"
        )
    return length


def _jsonl_values(path: Path, field: str | None) -> Iterator[tuple[str, Any]]:
    """The values of ``field``, each with its place for messages."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            row = _json_object(line, where)
            field = _choose_field(field, row.keys(), where, "field")
            yield f"{where}, field {field!r}", row[field]


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: no JSON in UTF-8: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a JSON object is expected, not {reprlib.repr(row)}")
    return row


def _from_parquet(path: Path, field: str | None, bytes_per_token: float) -> FileLengths:
    try:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ValueError(f"reading {path} needs pyarrow: pip install 'distca[trainer]'") from error
    try:
        names = pq.read_schema(path).names
        column = pq.read_table(
            path, columns=[_choose_field(field, names, str(path), "column")]
        ).column(0)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"lengths file {path} is no Parquet file: {error}") from error
    if column.null_count:
        raise ValueError(f"{path}: {column.null_count} documents have no value")
    kind = column.type
    if pa.types.is_integer(kind):
        return FileLengths(column.to_numpy(), False)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return FileLengths(pc.list_value_length(column).to_numpy(), False)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        nbytes = pc.binary_length(column).to_numpy()
        return FileLengths(_estimate(nbytes, bytes_per_token), True)
    raise ValueError(
        f"{path}: the column has type {kind}; valid are integers, lists of token ids and texts"
    )


def _numpy_lengths(path: Path) -> Int64Array:
    try:
        values: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, SyntaxError, EOFError, tokenize.TokenError, zipfile.BadZipFile) as error:
        raise ValueError(f"lengths file {path} is no numpy array: {error}") from error
    if isinstance(values, np.lib.npyio.NpzFile):
        values.close()
        raise ValueError(
            f"lengths file {path} is an archive of arrays (.npz); save the one with the lengths by "
            "numpy.save"
        )
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(
            f"{path} holds an array of shape {values.shape} and dtype {values.dtype}; a "
            "one-dimensional array of integers is expected"
        )
    whole: Int64Array = values.astype(np.int64)
    return np.diff(whole) if whole.size > 1 and whole[0] == 0 else whole


def _megatron_lengths(path: Path) -> Int64Array:
    """Tokens of each document: its sequences lie between two of the file's document bounds."""
    data = path.read_bytes()
    start = len(_MEGATRON_MAGIC) + _MEGATRON_HEADER.size
    if not data.startswith(_MEGATRON_MAGIC) or len(data) < start:
        raise ValueError(f"{path} is no index of a Megatron-LM data set: it begins otherwise")
    _, _, n_sequences, n_bounds = _MEGATRON_HEADER.unpack_from(data, len(_MEGATRON_MAGIC))
    bounds_at = start + n_sequences * (4 + 8)  # int32 lengths, then int64 pointers
    if len(data) < bounds_at + n_bounds * 8:
        raise ValueError(f"{path} ends early: {n_sequences} sequences, {n_bounds} bounds announced")
    sequences = np.frombuffer(data, "<i4", n_sequences, start).astype(np.int64)
    bounds = np.frombuffer(data, "<i8", n_bounds, bounds_at)
    bad = np.flatnonzero((bounds < 0) | (bounds > n_sequences))
    if bad.size:
        raise ValueError(
            f"{path}: bound number {bad[0] + 1} is {bounds[bad[0]]}; with {n_sequences} sequences "
            f"it must be 0 to {n_sequences}: write the index again"
        )
    return np.asarray(np.diff(np.append(0, np.cumsum(sequences))[bounds]), dtype=np.int64)


def _choose_field(field: str | None, names: Iterable[str], where: str, what: str) -> str:
    names = list(names)
    wanted = LENGTH_FIELDS if field is None else (field,)
    for name in wanted:
        if name in names:
            return name
    missing = f"no {what} {field!r}" if field is not None else f"none of {', '.join(wanted)}"
    raise ValueError(f"{where}: {missing}; there are {', '.join(names)}: name one with --field")


def _from_values(values: Iterable[tuple[str, Any]], bytes_per_token: float) -> FileLengths:
    """Places for messages, with numbers, lists of token ids or texts."""
    lengths: list[int] = []
    estimated = False
    for where, value in values:
        match value:
            case int() if not isinstance(value, bool):
                lengths.append(_not_beyond(value, where))
            case list():
                lengths.append(len(value))
            case str():
                estimated = True
                lengths.append(max(1, math.ceil(_utf8_bytes(value) / bytes_per_token)))
            case _:
                raise ValueError(
                    f"{where}: {reprlib.repr(value)} is no length; valid are integers, lists "
                    "of token ids and texts"
                )
    return FileLengths(np.array(lengths, dtype=np.int64), estimated)


def _utf8_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _estimate(nbytes: NDArray[Any], bytes_per_token: float) -> Int64Array:
    return np.maximum(1, np.ceil(nbytes / bytes_per_token)).astype(np.int64)
