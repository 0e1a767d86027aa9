"""Steps whose documents begin in nano-batch 0 and go on in nano-batch 1."""

from __future__ import annotations

from core_attention.manifest import RankManifest, Segment


def in_halves(n_ranks: int, *lengths: int) -> list[RankManifest]:
    """Documents one after another, over nano-batch 0 of all ranks and then over nano-batch 1, as
    even as can be."""
    total = sum(lengths)
    n_places = 2 * n_ranks
    bounds = [total * place // n_places for place in range(n_places + 1)]
    held: list[list[list[Segment]]] = [[[], []] for _ in range(n_ranks)]
    begin = 0
    for document, length in enumerate(lengths):
        for place in range(n_places):
            low, high = max(begin, bounds[place]), min(begin + length, bounds[place + 1])
            if low < high:
                nano_batch, rank = divmod(place, n_ranks)
                segment = Segment(document, length, low - begin, high - low)
                held[rank][nano_batch].append(segment)
        begin += length
    return [RankManifest(0, rank, nano_batches) for rank, nano_batches in enumerate(held)]
