"""Lengths from files of every kind."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distca.apps.simulator.length_files import read_lengths


def test_text_has_one_number_a_line(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("12\n\n 7 \n")
    assert read_lengths(path).lengths.tolist() == [12, 7]


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


def test_a_lone_surrogate_is_three_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud800abc"}\n')
    assert read_lengths(path, bytes_per_token=1).lengths.tolist() == [6]


@pytest.mark.parametrize(("name", "content"), [("a.txt", "12\n"), ("a.jsonl", '{"length": 12}\n')])
def test_a_byte_order_mark_is_left_out(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8-sig")
    assert read_lengths(path).lengths.tolist() == [12]


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


def test_numpy_holds_lengths_or_bounds(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.array([5, 3], dtype=np.uint32))
    assert read_lengths(path).lengths.tolist() == [5, 3]
    np.save(path, np.array([0, 5, 8]))
    assert read_lengths(path).lengths.tolist() == [5, 3]


def write_megatron_index(path: Path, sequences: list[int], bounds: list[int]) -> None:
    path.write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, len(sequences), len(bounds))
        + np.array(sequences, "<i4").tobytes()
        + np.zeros(len(sequences), "<i8").tobytes()
        + np.array(bounds, "<i8").tobytes()
    )


def test_megatron_documents_are_sums_of_their_sequences(tmp_path: Path) -> None:
    path = tmp_path / "a.idx"
    write_megatron_index(path, [4, 6, 5], [0, 2, 3])
    assert read_lengths(path).lengths.tolist() == [10, 5]


@pytest.mark.parametrize("bound", [-1, 4])
def test_a_megatron_bound_beyond_the_sequences_is_named(tmp_path: Path, bound: int) -> None:
    path = tmp_path / "a.idx"
    write_megatron_index(path, [4, 6, 5], [0, bound, 3])
    with pytest.raises(ValueError, match=f"a.idx: bound number 2 is {bound};.* must be 0 to 3"):
        read_lengths(path)


def _npy_with_header(text: str) -> bytes:
    header = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "holds no document lengths"),
        ("a.txt", b"3\nx\n", "line 2: 'x' is no integer"),
        ("a.txt", b"3\n-3\n", "length number 2 is -3"),
        ("a.txt", b"\xff\xfe", "is no text"),
        ("a.jsonl", b"{", "line 1: no JSON"),
        ("a.jsonl", b"[1]\n", "line 1: a JSON object is expected"),
        ("a.jsonl", b'{"n": 1}\n', "none of length, n_tokens.*there are n"),
        ("a.jsonl", b'\n{"length": null}\n', "a.jsonl, line 2, field 'length': None is no length"),
        ("a.jsonl", b'{"length": 2.5}\n', "line 1, field 'length': 2.5 is no length"),
        ("a.jsonl", b'{"length": true}\n', "line 1, field 'length': True is no length"),
        (
            "a.jsonl",
            b'{"n": 1, "text": "a"}\n{"text": "\xe9"}\n',
            "a.jsonl, line 2: no JSON in UTF-8",
        ),
        ("a.jsonl", b'{"length": %d}\n' % 10**23, "line 1, field 'length': length 1000.* out of"),
        ("a.jsonl", b'{"length": %s}\n' % (b"9" * 5000), "line 1: no JSON"),
        ("a.jsonl", b'{"a": %s}\n' % (b"[" * 10**5), "line 1: no JSON"),
        ("a.txt", b"%d\n" % 10**23, "a.txt, line 1: length 1000.* out of range"),
        ("a.npy", b"PK\x03\x04", "is no numpy array"),
        ("a.parquet", b"PAR?", "is no Parquet file"),
        ("a.npy", b"no", "is no numpy array"),
        ("a.npy", _npy_with_header("{'descr': '<i8', 'shape': (1,"), "is no numpy array"),
        ("a.npy", _npy_with_header("{'descr': '<i8', 0x, 'shape': (1,)}"), "is no numpy array"),
        ("a.idx", b"no", "is no index of a Megatron-LM data set"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_lengths(path)


def test_a_parquet_file_whose_names_are_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"length": [1], "wantfor": [2]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"wantfor", b"want\xffor"))
    with pytest.raises(ValueError, match=r"a\.parquet is no Parquet file"):
        read_lengths(path)


def test_a_missing_file_and_a_missing_column_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_lengths(tmp_path / "none.txt")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"length": [1, 2]}), path)
    with pytest.raises(ValueError, match="no column 'size'; there are length"):
        read_lengths(path, "size")
    pq.write_table(pa.table({"length": [0.5]}), path)
    with pytest.raises(ValueError, match="has type double"):
        read_lengths(path)
    pq.write_table(pa.table({"length": pa.array([1, None])}), path)
    with pytest.raises(ValueError, match="1 documents have no value"):
        read_lengths(path)


@pytest.mark.parametrize("name", ["a.txt", "a.npy", "a.idx"])
def test_a_field_of_a_file_without_fields_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("12")
    with pytest.raises(ValueError, match=f"field is 'n', and lengths file {path} has none"):
        read_lengths(path, "n")


def test_an_archive_of_arrays_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", lengths=np.array([3]))
    path = (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(ValueError, match="is an archive of arrays"):
        read_lengths(path)


@pytest.mark.parametrize("bytes_per_token", [1e-300, 0.0, float("nan")])
def test_a_token_has_some_bytes(tmp_path: Path, bytes_per_token: float) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\n')
    with pytest.raises(ValueError, match=f"bytes_per_token is {bytes_per_token}; it must be"):
        read_lengths(path, bytes_per_token=bytes_per_token)


def test_an_array_of_the_wrong_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"shape \(2, 2\) and dtype float64"):
        read_lengths(path)
