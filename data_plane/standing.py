"""The call that the main thread is in, for messages to those who wait for this process."""

from __future__ import annotations

import sys
import sysconfig
import threading
from types import FrameType

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def call_of_main_thread() -> str:
    """The innermost call of the main thread, and the line outside of libraries that led to it, for
    example ``"step in adamw.py:88, from train.py:41"``."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "no Python code"
    inner = f"{frame.f_code.co_name} in {_place(frame)}"
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.startswith(_LIBRARIES):
        outer = outer.f_back
    return inner if outer is None or outer is frame else f"{inner}, from {_place(outer)}"


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
