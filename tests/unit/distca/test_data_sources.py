"""Opening a corpus, and every way in which one can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from distca.apps.train.corpus import Corpus, open_corpus
from distca.errors import DistcaError


def texts(corpus: Corpus) -> list[str]:
    return [
        bytes(corpus.tokens(document, 0, int(length)).tolist()).decode()
        for document, length in enumerate(corpus.lengths)
    ]


def test_default_is_the_standard_library() -> None:
    corpus = open_corpus(None)
    assert corpus.lengths.min() >= 1
    decoder = len(Path(__import__("json").decoder.__file__).read_bytes())
    assert decoder in corpus.lengths


def test_folder_gives_one_document_a_text_file_in_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "second.txt").write_text("zwei")
    (tmp_path / "a.txt").write_text("grün")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_text("no")
    assert texts(open_corpus(tmp_path)) == ["grün", "zwei"]


def test_fingerprint_differs_when_a_length_differs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("eins")
    before = open_corpus(tmp_path).fingerprint
    (tmp_path / "a.txt").write_text("einst")
    assert open_corpus(tmp_path).fingerprint != before


def test_what_holds_no_text_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    with pytest.raises(DistcaError, match="texts"):
        open_corpus(folder)
    folder.mkdir()
    for content in (None, b"PAR1\0", b""):
        if content is not None:
            (folder / "shard.parquet").write_bytes(content)
        with pytest.raises(DistcaError, match="texts"):
            open_corpus(folder)


def test_file_that_shrinks_or_vanishes_while_training_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a long text")
    corpus = open_corpus(tmp_path)
    for change in (lambda: path.write_text("a"), path.unlink):
        change()
        with pytest.raises(DistcaError, match=r"a\.txt"):
            corpus.tokens(0, 0, 11)
