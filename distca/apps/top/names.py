"""Names in little room: their differences stay, what they have in common goes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

ELLIPSIS = "…"


def short_names(names: Sequence[str], width: int) -> list[str]:
    """Shortens ``names`` to ``width`` characters each, where different ones stay different.

    Names that fit all stay as they are. Else what all begin with, and what all end with, becomes an
    ellipsis, a word at a time; and of what is then still too long the end stays, where names of
    machines and ranks differ.
    """
    if all(len(name) <= width for name in names):
        return list(names)
    different = sorted(set(names))
    begin = _common_words(different)
    end = _common_words([name[begin:][::-1] for name in different])
    short = [_without(name, begin, len(name) - end) for name in names]
    cut = [name if len(name) <= width else ELLIPSIS + name[1 - width :] for name in short]
    return cut if len(set(cut)) == len(different) else short


def _without(name: str, begin: int, end: int) -> str:
    head = ELLIPSIS if begin > 1 else name[:begin]
    tail = ELLIPSIS if len(name) - end > 1 else name[end:]
    return head + name[begin:end] + tail


def _common_words(names: Sequence[str]) -> int:
    """How many characters all names begin with, up to the end of a word, and never all of one; 0
    for a single name."""
    if len(names) < 2:
        return 0
    limit = min(map(len, names)) - 1
    alike = (len(set(each)) == 1 for each in zip(*names, strict=False))
    common = sum(1 for _ in itertools.takewhile(bool, itertools.islice(alike, limit)))
    ends = [match.end() for match in re.finditer(r"[-._:/ ]", names[0][:common])]
    return ends[-1] if ends else 0
