"""Opening a corpus: every kind of source, and every way in which one can be wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distca.apps.train.corpus import Corpus, open_corpus
from distca.errors import DataError


def texts(corpus: Corpus) -> list[str]:
    return [
        corpus.read(document, 0, int(length)).decode()
        for document, length in enumerate(corpus.lengths)
    ]


def test_default_is_the_standard_library() -> None:
    corpus = open_corpus(None, "text")
    assert corpus.lengths.min() >= 1
    assert any(
        b"class JSONDecoder" in corpus.read(n, 0, 20_000) for n in range(len(corpus.lengths))
    )


def test_folder_gives_one_document_a_text_file_in_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "second.txt").write_text("zwei")
    (tmp_path / "a.txt").write_text("eins")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_text("no")
    corpus = open_corpus(tmp_path, "text")
    assert texts(corpus) == ["eins", "zwei"]


def test_jsonl_takes_the_chosen_field_and_leaves_empty_texts_out(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"body": text}) for text in ("grün", "", "b")) + "\n\n")
    corpus = open_corpus(path, "body")
    assert texts(corpus) == ["grün", "b"]


def test_parquet_takes_the_chosen_column(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"id": [1, 2, 3], "body": ["one", None, "three"]}), path)
    assert texts(open_corpus(path, "body")) == ["one", "three"]


def test_fingerprint_differs_when_a_length_differs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("eins")
    before = open_corpus(tmp_path, "text").fingerprint
    (tmp_path / "a.txt").write_text("einst")
    assert open_corpus(tmp_path, "text").fingerprint != before


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "eins"}', encoding="utf-8-sig")
    assert list(open_corpus(path, "text").lengths) == [4]


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("absent.jsonl", None, ""),
        ("data.csv", b"a,b\n", ""),
        ("data.jsonl", b"", ""),
        ("data.jsonl", b"{]\n", ":1"),
        ("data.jsonl", b'{"text": %s}' % (b"9" * 5000), ":1"),
        ("data.jsonl", b"[" * 100_000, ":1"),
        ("data.jsonl", b'{"text": "a"}\n{"body": "b"}\n', ":2"),
        ("data.jsonl", b'["text"]\n', ":1"),
        ("data.jsonl", b'{"text": 3}\n', ":1"),
        ("data.jsonl", b'{"text": ""}\n', ""),
        ("data.jsonl", b"\xff\xfe\n", ":0"),
        ("data.parquet", b"not parquet", ""),
    ],
)
def test_bad_file_is_named(tmp_path: Path, name: str, content: bytes | None, where: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(f"{path}{where}")):
        open_corpus(path, "text")


@pytest.mark.parametrize("damaged", [b"wantfor", b"a text"])
def test_parquet_whose_names_or_texts_are_no_text_is_named(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "data.parquet"
    table = pa.table({"text": ["a text"], "wantfor": [2]})
    pq.write_table(table, path, store_schema=False, compression="none")
    path.write_bytes(path.read_bytes().replace(damaged, damaged[:-1] + b"\xff"))
    with pytest.raises(DataError, match=r"data\.parquet cannot be read as Parquet"):
        open_corpus(path, "text")


def test_parquet_without_the_column_or_with_numbers_in_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"id": [1]}), path)
    with pytest.raises(DataError, match=r"no column 'text', only \['id'\]"):
        open_corpus(path, "text")
    with pytest.raises(DataError, match=":1"):
        open_corpus(path, "id")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match="data"):
        open_corpus(path, "text")


def test_folder_without_text_is_refused(tmp_path: Path) -> None:
    for content in (None, b"PAR1\0", b""):
        if content is not None:
            (tmp_path / "shard.parquet").write_bytes(content)
        with pytest.raises(DataError, match=tmp_path.name):
            open_corpus(tmp_path, "text")


def test_file_that_shrinks_or_vanishes_while_training_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a long text")
    corpus = open_corpus(tmp_path, "text")
    path.write_text("a")
    with pytest.raises(DataError, match="document 0 had 11 bytes"):
        corpus.tokens(0, 0, 11)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.txt: No such file"):
        corpus.tokens(0, 0, 11)
