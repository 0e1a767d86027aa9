"""Document lengths from what a user has: a text file, JSONL, Parquet or a tokenized data set.

Where a file holds texts and no lengths, tokens are estimated from their UTF-8 bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core_attention.arrays import Int64Array
from distca.simulator.errors import InputError, require_positive
from distca.simulator.packing import checked_lengths

LENGTH_FIELDS = ("length", "n_tokens", "num_tokens", "token_count", "input_ids", "tokens", "text")
"""Fields and columns looked for when none is named, in this order."""

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
        bytes_per_token: by which UTF-8 bytes of texts are divided.

    Raises:
        InputError: the file is missing, empty or malformed, a field is missing, or a length is not
            positive.
    """
    require_positive("bytes_per_token", bytes_per_token)
    if not path.is_file():
        raise InputError(f"lengths file {path} does not exist, or is no file")
    readers: dict[str, Callable[[], FileLengths]] = {
        ".jsonl": lambda: _from_values(_jsonl_values(path, field), bytes_per_token),
        ".parquet": lambda: _from_parquet(path, field, bytes_per_token),
        ".npy": lambda: FileLengths(_numpy_lengths(path), False),
        ".idx": lambda: FileLengths(_megatron_lengths(path), False),
    }
    read = readers.get(path.suffix.lower(), lambda: FileLengths(_text_lengths(path), False))
    try:
        found = read()
    except OSError as error:
        raise InputError(f"lengths file {path} cannot be read: {error}") from error
    return FileLengths(checked_lengths(found.lengths, str(path)), found.estimated)


def _text_lengths(path: Path) -> Int64Array:
    lengths = []
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise InputError(
            f"lengths file {path} is no text ({error.reason}); valid are text with one number a "
            "line, .jsonl, .parquet, .npy and .idx"
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            lengths.append(int(line))
        except ValueError:
            raise InputError(
                f"{path}, line {number}: {line.strip()[:40]!r} is no integer; a text file has one "
                "length a line"
            ) from None
    return np.array(lengths, dtype=np.int64)


def _jsonl_values(path: Path, field: str | None) -> Iterable[Any]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path}, line {number}: no JSON: {error.msg}") from error
            if not isinstance(row, dict):
                raise InputError(f"{path}, line {number}: a JSON object is expected, not {row!r}")
            field = _choose_field(field, row.keys(), f"{path}, line {number}", "field")
            yield row[field]


def _from_parquet(path: Path, field: str | None, bytes_per_token: float) -> FileLengths:
    try:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq
    except ImportError as error:
        raise InputError(f"reading {path} needs pyarrow: pip install 'distca[trainer]'") from error
    try:
        names = pq.read_schema(path).names
        column = pq.read_table(
            path, columns=[_choose_field(field, names, str(path), "column")]
        ).column(0)
    except pa.ArrowInvalid as error:
        raise InputError(f"lengths file {path} is no Parquet file: {error}") from error
    if column.null_count:
        raise InputError(f"{path}: {column.null_count} documents have no value")
    kind = column.type
    if pa.types.is_integer(kind):
        return FileLengths(column.to_numpy(), False)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return FileLengths(pc.list_value_length(column).to_numpy(), False)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        nbytes = pc.binary_length(column).to_numpy()
        return FileLengths(_estimate(nbytes, bytes_per_token), True)
    raise InputError(
        f"{path}: the column has type {kind}; valid are integers, lists of token ids and texts"
    )


def _numpy_lengths(path: Path) -> Int64Array:
    try:
        values: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(f"lengths file {path} is no numpy array: {error}") from error
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise InputError(
            f"{path} holds an array of shape {values.shape} and dtype {values.dtype}; a "
            "one-dimensional array of integers is expected"
        )
    values = values.astype(np.int64)
    return np.diff(values) if values.size > 1 and values[0] == 0 else values


def _megatron_lengths(path: Path) -> Int64Array:
    """Tokens of each document: its sequences lie between two of the file's document bounds."""
    data = path.read_bytes()
    start = len(_MEGATRON_MAGIC) + _MEGATRON_HEADER.size
    if not data.startswith(_MEGATRON_MAGIC) or len(data) < start:
        raise InputError(f"{path} is no index of a Megatron-LM data set: it begins otherwise")
    _, _, n_sequences, n_bounds = _MEGATRON_HEADER.unpack_from(data, len(_MEGATRON_MAGIC))
    bounds_at = start + n_sequences * (4 + 8)  # int32 lengths, then int64 pointers
    if len(data) < bounds_at + n_bounds * 8:
        raise InputError(f"{path} ends early: {n_sequences} sequences, {n_bounds} bounds announced")
    sequences = np.frombuffer(data, "<i4", n_sequences, start).astype(np.int64)
    bounds = np.frombuffer(data, "<i8", n_bounds, bounds_at)
    return np.asarray(np.diff(np.append(0, np.cumsum(sequences))[bounds]), dtype=np.int64)


def _choose_field(field: str | None, names: Iterable[str], where: str, what: str) -> str:
    names = list(names)
    wanted = LENGTH_FIELDS if field is None else (field,)
    for name in wanted:
        if name in names:
            return name
    missing = f"no {what} {field!r}" if field is not None else f"none of {', '.join(wanted)}"
    raise InputError(f"{where}: {missing}; there are {', '.join(names)}: name one with --field")


def _from_values(values: Iterable[Any], bytes_per_token: float) -> FileLengths:
    """Numbers, lists of token ids or texts."""
    lengths: list[int] = []
    estimated = False
    for number, value in enumerate(values, start=1):
        match value:
            case bool():
                raise InputError(f"document {number}: {value} is no length")
            case int():
                lengths.append(value)
            case list():
                lengths.append(len(value))
            case str():
                estimated = True
                lengths.append(max(1, math.ceil(len(value.encode()) / bytes_per_token)))
            case _:
                raise InputError(
                    f"document {number}: {value!r} is no length; valid are integers, lists of "
                    "token ids and texts"
                )
    return FileLengths(np.array(lengths, dtype=np.int64), estimated)


def _estimate(nbytes: NDArray[Any], bytes_per_token: float) -> Int64Array:
    return np.maximum(1, np.ceil(nbytes / bytes_per_token)).astype(np.int64)
