"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from core_attention.whole_file import check_can_write, write_whole


def test_content_and_permissions(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(tmp_path / "none" / "file", "text")
    assert caught.value.filename == str(tmp_path / "none" / "file")
    path, former = tmp_path / "file", os.umask(0o027)
    try:
        write_whole(path, "größer")
    finally:
        os.umask(former)
    assert path.read_bytes() == "größer".encode()
    assert path.stat().st_mode & 0o777 == 0o640
    write_whole(path, b"\x00secret", mode=0o600, durable=True)
    assert path.read_bytes() == b"\x00secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_what_is_too_large_for_memory_is_written_piece_by_piece(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, lambda file: [file.write(b"12"), file.write(b"3")], durable=True)
    assert path.read_bytes() == b"123"

    def fail(file: BinaryIO) -> None:
        file.write(b"4")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_whole(path, fail)
    assert path.read_bytes() == b"123"
    assert os.listdir(tmp_path) == ["file"]


def test_what_cannot_be_written_leaves_the_former_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_whole(path, "former")

    def full(descriptor: int) -> None:
        raise BlockingIOError

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BlockingIOError):
        write_whole(path, "new", durable=True)
    assert path.read_text() == "former"
    assert os.listdir(tmp_path) == ["file"]


def test_readers_never_see_a_part(tmp_path: Path) -> None:
    path = tmp_path / "file"
    texts = [str(digit) * 300_000 for digit in range(3)]
    write_whole(path, texts[0])
    done = threading.Event()

    def write(text: str) -> None:
        while not done.is_set():
            write_whole(path, text)

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    try:
        for _ in range(200):
            assert path.read_text() in texts
    finally:
        done.set()
        for writer in writers:
            writer.join(10)


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    target, link, pipe = (tmp_path / name for name in ("target", "link", "pipe"))
    target.write_text("former")
    link.symlink_to("target")
    check_can_write(link)
    write_whole(link, "new", durable=True)
    assert (link.is_symlink(), target.read_text()) == (True, "new")
    os.mkfifo(pipe)
    check_can_write(pipe)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(pipe.read_text)
        write_whole(pipe, "whole", mode=0o600, durable=True)
        assert reading.result(timeout=30) == "whole"
    assert pipe.is_fifo()
    # As /dev/stdout is, whose target has no name.
    reader, writer = os.pipe()
    check_can_write(Path(f"/proc/self/fd/{writer}"))
    write_whole(Path(f"/proc/self/fd/{writer}"), "whole")
    assert os.read(reader, 5) == b"whole"
    os.close(reader)
    os.close(writer)
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.RaisesExc(OSError, check=lambda error: error.errno == errno.ELOOP):
        write_whole(loop, "text")
    loop.unlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe", "target"]
