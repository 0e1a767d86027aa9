"""Lengths from files of every kind."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distca.apps.simulator.length_files import read_lengths
from tests.support.errors import refused


def test_jsonl_takes_numbers_token_lists_and_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps({"length": 5, "text": "x"}) + "\n\n" + json.dumps({"length": [1, 2]}) + "\n"
    )
    found = read_lengths(path)
    assert (found.lengths.tolist(), found.estimated) == ([5, 2], False)
    path.write_text(json.dumps({"text": "é" * 5}) + "\n")
    found = read_lengths(path, bytes_per_token=4)
    assert (found.lengths.tolist(), found.estimated) == ([3], True)


@pytest.mark.parametrize(
    ("column", "lengths", "estimated"),
    [
        (pa.array([3, 4]), [3, 4], False),
        (pa.array([[1, 2, 3], [4]]), [3, 1], False),
        (pa.array(["12345", ""]), [2, 1], True),
    ],
)
def test_parquet_takes_numbers_token_lists_and_texts(
    tmp_path: Path, column: pa.Array, lengths: list[int], estimated: bool
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"other": [0, 0], "mine": column}), path)
    found = read_lengths(path, "mine")
    assert (found.lengths.tolist(), found.estimated) == (lengths, estimated)


def megatron_index(sequences: list[int], bounds: list[int]) -> bytes:
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, len(sequences), len(bounds))
        + np.array(sequences, "<i4").tobytes()
        + np.zeros(len(sequences), "<i8").tobytes()
        + np.array(bounds, "<i8").tobytes()
    )


def npy(*numbers: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(numbers, dtype=np.uint32))
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "lengths"),
    [
        ("a.txt", b"12\n\n 7 \n", [12, 7]),
        # A byte order mark is left out.
        ("a.txt", b"\xef\xbb\xbf12\n", [12]),
        ("a.jsonl", b'\xef\xbb\xbf{"length": 12}\n', [12]),
        # A lone surrogate is three bytes.
        ("a.jsonl", b'{"text": "\\ud800abc"}\n', [6]),
        # Lengths or bounds.
        ("a.npy", npy(5, 3), [5, 3]),
        ("a.npy", npy(0, 5, 8), [5, 3]),
        # Sums of sequences.
        ("a.idx", megatron_index([4, 6, 5], [0, 2, 3]), [10, 5]),
    ],
)
def test_lengths_of_every_kind_of_file(
    tmp_path: Path, name: str, content: bytes, lengths: list[int]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert read_lengths(tmp_path / name, bytes_per_token=1).lengths.tolist() == lengths


def _npy_with_header(text: str) -> bytes:
    header = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b""),
        ("a.txt", b"3\nx\n"),
        ("a.txt", b"3\n-3\n"),
        ("a.txt", b"\xff\xfe"),
        ("a.txt", b"%d\n" % 10**23),
        ("a.jsonl", b"{"),
        ("a.jsonl", b"[1]\n"),
        ("a.jsonl", b'{"n": 1}\n'),
        ("a.jsonl", b'\n{"length": null}\n'),
        ("a.jsonl", b'{"length": 2.5}\n'),
        ("a.jsonl", b'{"length": true}\n'),
        ("a.jsonl", b'{"n": 1, "text": "a"}\n{"text": "\xe9"}\n'),
        ("a.jsonl", b'{"length": %d}\n' % 10**23),
        ("a.jsonl", b'{"length": %s}\n' % (b"9" * 5000)),
        ("a.jsonl", b'{"a": %s}\n' % (b"[" * 10**5)),
        ("a.npy", b"PK\x03\x04"),
        ("a.npy", b"no"),
        ("a.npy", _npy_with_header("{'descr': '<i8', 'shape': (1,")),
        ("a.npy", _npy_with_header("{'descr': '<i8', 0x, 'shape': (1,)}")),
        ("a.parquet", b"PAR?"),
        ("a.idx", b"no"),
        ("a.idx", megatron_index([4, 6, 5], [0, -1, 3])),
        ("a.idx", megatron_index([4, 6, 5], [0, 4, 3])),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with refused():
        read_lengths(path)


def test_what_a_file_lacks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    asked: list[tuple[Path, str | None]] = [(tmp_path / "none.txt", None), (path, "size")]
    pq.write_table(pa.table({"length": [1, 2]}), path)
    for number, column in enumerate(([0.5], pa.array([1, None]))):
        asked.append((tmp_path / f"{number}.parquet", None))
        pq.write_table(pa.table({"length": column}), asked[-1][0])
    broken = tmp_path / "broken.parquet"
    pq.write_table(pa.table({"length": [1], "wantfor": [2]}), broken, store_schema=False)
    broken.write_bytes(broken.read_bytes().replace(b"wantfor", b"want\xffor"))
    np.savez(tmp_path / "a.npz", lengths=np.array([3]))
    np.save(tmp_path / "b.npy", np.zeros((2, 2)))
    asked += [(each, None) for each in (broken, tmp_path / "b.npy")]
    asked.append(((tmp_path / "a.npz").rename(tmp_path / "a.npy"), None))
    for name in ("c.txt", "c.npy", "c.idx"):
        (tmp_path / name).write_text("12")
        asked.append((tmp_path / name, "n"))
    for path, field in asked:
        with refused():
            read_lengths(path, field)


@pytest.mark.parametrize("bytes_per_token", [1e-300, 0.0, float("nan")])
def test_a_token_has_some_bytes(tmp_path: Path, bytes_per_token: float) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\n')
    with refused():
        read_lengths(path, bytes_per_token=bytes_per_token)
