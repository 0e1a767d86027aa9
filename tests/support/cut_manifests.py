"""Steps whose documents go on over ranks: and over nano-batches, or each within one."""

from __future__ import annotations

import re
from collections.abc import Iterable

from core_attention.manifest import NO_PARENT, RankManifest, Segment


def in_halves(n_ranks: int, *lengths: int) -> list[RankManifest]:
    """Documents one after another, over nano-batch 0 of all ranks and then over nano-batch 1, as
    even as can be."""
    places = _spread(enumerate(lengths), 2 * n_ranks)
    return _manifests(places[:n_ranks], places[n_ranks:])


def whole_on_ranks(n_ranks: int, *lengths: int) -> list[RankManifest]:
    """Every rank has every so manieth document whole, over both of its nano-batches."""
    documents = list(enumerate(lengths))
    halves = [_spread(documents[rank::n_ranks], 2) for rank in range(n_ranks)]
    return _manifests([first for first, _ in halves], [second for _, second in halves])


def within_nano_batches(n_ranks: int, *lengths: int) -> list[RankManifest]:
    """Every second document over nano-batch 1 of all ranks, the others over nano-batch 0."""
    documents = list(enumerate(lengths))
    return _manifests(_spread(documents[::2], n_ranks), _spread(documents[1::2], n_ranks))


def pieces(*ranks: str) -> list[RankManifest]:
    """Of each rank: its nano-batches between bars, their segments as DOCUMENT:BEGIN-END/LENGTH,
    with <PARENT@OFFSET behind those of a document that branches off another."""
    found = re.compile(r"(\d+):(\d+)-(\d+)/(\d+)(?:<(\d+)@(\d+))?")
    manifests = []
    for rank, nano_batches in enumerate(ranks):
        segments = [
            [
                Segment(
                    int(document),
                    int(length),
                    int(begin),
                    int(end) - int(begin),
                    int(parent or NO_PARENT),
                    int(offset or 0),
                )
                for document, begin, end, length, parent, offset in found.findall(nano)
            ]
            for nano in nano_batches.split("|")
        ]
        manifests.append(RankManifest(0, rank, segments))
    return manifests


def tree() -> list[RankManifest]:
    """A trunk over two of three ranks, with branches of branches on all of them and in both
    nano-batches."""
    return pieces(
        "1:0-90/150 2:90-97/97<1@90 | 3:97-140/140<2@97 4:150-151/151<1@150",
        "1:90-150/150 5:150-190/190<1@150 | 6:190-220/220<5@190 7:0-11/11",
        "8:120-170/170<1@120 9:170-175/175<8@170 | 10:150-199/199<8@150 11:20-30/30<1@20",
    )


def cut_in_two(lengths: Iterable[int], first_id: int) -> list[list[Segment]]:
    """The segments of two nano-batches of one rank, documents one after another, as even as can
    be; ids count on from ``first_id``."""
    return _spread(enumerate(lengths, first_id), 2)


def _spread(documents: Iterable[tuple[int, int]], n_places: int) -> list[list[Segment]]:
    """Documents, ids and lengths, one after another over places, as even as can be."""
    documents = list(documents)
    total = sum(length for _, length in documents)
    bounds = [total * place // n_places for place in range(n_places + 1)]
    places: list[list[Segment]] = [[] for _ in range(n_places)]
    begin = 0
    for document, length in documents:
        for place, segments in enumerate(places):
            low, high = max(begin, bounds[place]), min(begin + length, bounds[place + 1])
            if low < high:
                segments.append(Segment(document, length, low - begin, high - low))
        begin += length
    return places


def _manifests(*nano_batches: list[list[Segment]]) -> list[RankManifest]:
    """Of nano-batches, by rank."""
    return [
        RankManifest(0, rank, held) for rank, held in enumerate(zip(*nano_batches, strict=True))
    ]
