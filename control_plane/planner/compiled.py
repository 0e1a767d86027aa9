"""The one decorator for compiled functions: numba, cached on disk where that is possible."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import numba
import numpy as np
from numba.core import caching, event
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

BoolArray = NDArray[np.bool_]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """``function`` compiled by numba in nopython mode on first use.

    The machine code is kept beside the source or in numba's cache folder (``NUMBA_CACHE_DIR``). A
    cache folder that this process may only read, as in a container image, serves as well, through a
    temporary copy. Without any writable folder a temporary one is used, and the next process
    compiles again; see :func:`temporary_cache`.

    While it runs, other threads do, too.
    """
    return _compiled(function, {"nogil": True})


def compiled_inner(function: F) -> F:
    """The same for a function that only compiled functions call: without the wrapper that lets
    Python call it, which takes longer to compile than the function."""
    return _compiled(function, {"no_cpython_wrapper": True, "no_cfunc_wrapper": True})


def compiled_leaf(function: F) -> F:
    """The same for a function that neither makes nor returns arrays.

    It goes without counts of references to those it is passed, which take longer than what it does;
    and into its callers, because a call would copy its arguments: tuples of arrays, which come to
    hundreds of words, took over half of the time of the search for chunks.
    """
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}
    try:
        return _compiled(function, options | {"_nrt": False})
    except KeyError:  # a numba that has no such option
        return _compiled(function, options)


def compiled_into(function: F) -> F:
    """The same for a large function that one or two compiled ones call: it becomes a part of each,
    as machine code of a function of its own would hold that of all it calls once more, and to make
    that takes ten seconds."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "inline": "always"}
    return _compiled(function, options)


class NotInCacheError(LookupError):
    """Machine code that :func:`only_from_cache` wanted is not in the cache."""


@contextlib.contextmanager
def only_from_cache() -> Iterator[None]:
    """Within it, this thread compiles nothing: machine code comes from the cache.

    Raises:
        NotInCacheError: some is not there.
    """
    with event.install_listener("numba:compile", _Refusal(threading.get_ident())):
        yield


class _Refusal(event.Listener):
    """Refuses to let one thread compile."""

    def __init__(self, thread: int) -> None:
        self._thread = thread

    def on_start(self, event: Any) -> None:
        if threading.get_ident() == self._thread:
            raise NotInCacheError(str(event.data["dispatcher"].py_func.__qualname__))

    def on_end(self, event: Any) -> None:
        """Nothing to do."""


def cache_folder() -> str:
    """The folder in which this process keeps machine code, for the environment variable
    ``NUMBA_CACHE_DIR`` of another one that is to share it; empty if numba chooses, as it will
    there."""
    config: Any = numba.config
    return str(config.CACHE_DIR or "")


def temporary_cache() -> str:
    """The reason why machine code is kept in a folder that goes with this process; empty if it is
    not."""
    return _Cache.why_temporary


def has_cache() -> bool:
    """Return whether machine code can be kept at all."""
    return not _Cache.is_impossible


class _Cache:
    """The settings of this process."""

    why_temporary = ""
    is_impossible = False


def _compiled(function: F, options: dict[str, Any]) -> F:
    # Divisions are those of numpy. Python's look for zeros, which takes a tenth of the time, and
    # raise; but functions without counts of references must not.
    options = {"error_model": "numpy", **options}
    _make_cache_writable()
    dispatcher = _cached(function, options)
    if dispatcher is None and _set_temporary_cache("there is no folder that it may be written to"):
        dispatcher = _cached(function, options)
    if dispatcher is None:
        _Cache.is_impossible = True
        return cast(F, numba.njit(**options)(function))
    cache_file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if cache_file is not None:
        cache_file.__class__ = _SealedFile
        # Numba looks at the file of a function alone, but its machine code holds that of the
        # functions it calls, in other files: without this, a change there would go unnoticed.
        cache_file._source_stamp = _sources_stamp(function.__code__.co_filename)
    return dispatcher


_CacheFile: Any = caching.IndexDataCacheFile


class _SealedFile(_CacheFile):  # type: ignore[misc]
    """Numba's files of one function, each with its digest at its end, which unpickling passes over.

    What a crash or a full disk has damaged is compiled again and overwritten: LLVM, given damaged
    machine code, ends the process.
    """

    @contextlib.contextmanager
    def _open_for_write(self, path: str) -> Iterator[IO[bytes]]:
        content = io.BytesIO()
        yield content
        with super()._open_for_write(path) as file:
            file.write(content.getvalue() + _digest(content.getvalue()))

    def _load_index(self) -> Any:
        if not _is_whole(Path(self._index_path)):
            return {}
        try:
            return super()._load_index()
        except (ImportError, AttributeError):  # of a release whose modules have other names
            return {}

    def _load_data(self, name: str) -> Any:
        path = Path(self._data_path(name))
        if not _is_whole(path):
            raise OSError(f"{path} is damaged")  # to numba the same as a file that is not there
        try:
            return super()._load_data(name)
        except (ImportError, AttributeError) as error:
            raise OSError(f"{path} is of another release") from error


def _is_whole(path: Path) -> bool:
    """Return whether a file of the cache is there as it was written."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    whole = content[-_DIGEST_BYTES:] == _digest(content[:-_DIGEST_BYTES])
    if not whole:
        _log_damage(path.parent)
    return whole


@cache
def _log_damage(folder: Path) -> None:
    logger.warning("machine code in %s is damaged; what is damaged is compiled again", folder)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


_DIGEST_BYTES = hashlib.sha256().digest_size


def _cached(function: F, options: dict[str, Any]) -> F | None:
    """``function`` compiled and cached; None if numba finds no place where it may write."""
    try:
        return cast(F, numba.njit(cache=True, **options)(function))
    except RuntimeError:
        return None


@cache
def _make_cache_writable() -> None:
    """Gives numba a copy of its cache folder where that is read-only and would be ignored."""
    config: Any = numba.config
    if not config.CACHE_DIR or not Path(config.CACHE_DIR).is_dir():
        return
    if os.access(config.CACHE_DIR, os.W_OK):
        return
    original = config.CACHE_DIR
    if _set_temporary_cache(f"{original} is read-only"):
        shutil.copytree(original, config.CACHE_DIR, dirs_exist_ok=True)


@cache
def _set_temporary_cache(why: str) -> bool:
    """Has numba keep machine code in a temporary folder; whether that could be made."""
    try:
        folder = tempfile.mkdtemp(prefix="distca-numba-")
    except OSError:
        return False
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config: Any = numba.config
    config.CACHE_DIR = folder
    _Cache.why_temporary = why
    return True


@cache
def _sources_stamp(path: str) -> tuple[tuple[str, int, int], ...]:
    """Changes whenever the source file ``path`` does, or one of this package that it imports,
    directly or through others."""
    folder = Path(__file__).resolve().parent
    files, unread = {Path(path).resolve()}, [Path(path).resolve()]
    while unread:
        for name in _IMPORTED.findall(unread.pop().read_text()):
            file = folder / f"{name}.py"
            if file.is_file() and file not in files:
                files.add(file)
                unread.append(file)
    files.add(Path(__file__).resolve())
    return tuple((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in sorted(files))


_IMPORTED = re.compile(r"^\s*from control_plane\.planner\.(\w+) import", re.MULTILINE)
