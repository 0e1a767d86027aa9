"""Parts of a plan that have nothing to do with each other, made at the same time.

Compiled code lets go of Python's lock (``compiled.compiled``), so threads do it on several cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


class Run(Protocol):
    """Calls a function with several arguments."""

    def __call__(
        self, function: Callable[[Given], Made], arguments: Iterable[Given]
    ) -> list[Made]: ...


@contextmanager
def threads(n: int) -> Iterator[Run]:
    """A pool that calls a function with several arguments in ``n`` threads, and returns the results
    in their order; the first argument's error is raised first.

    One thread is the caller's own: forbidding it to compile (``compiled.only_from_cache``)
    forbids all that is called.
    """
    if n == 1:
        yield lambda function, arguments: [function(each) for each in arguments]
        return
    with ThreadPoolExecutor(n, thread_name_prefix="planning-part") as pool:
        yield lambda function, arguments: list(pool.map(function, arguments))
