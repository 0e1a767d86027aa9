"""What trees save, counted from lengths, beside what is packed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from distca.apps.preview.groups import read_groups

Group = int | dict[str, Any]


def groups() -> st.SearchStrategy[Group]:
    lengths: st.SearchStrategy[Group] = st.integers(1, 5)
    return st.recursive(
        lengths,
        lambda below: st.fixed_dictionaries(
            {"prompt": lengths, "completions": st.lists(below, min_size=1, max_size=3)}
        ),
        max_leaves=8,
    )


@given(group=groups())
def test_rows_and_pairs_are_those_of_distinct_prefixes(group: Group) -> None:
    numbers = itertools.count()

    def samples(node: Group, before: list[int]) -> list[list[int]]:
        length = node if isinstance(node, int) else node["prompt"]
        tokens = before + [next(numbers) for _ in range(length)]
        if isinstance(node, int):
            return [tokens]
        return [each for below in node["completions"] for each in samples(below, tokens)]

    found = samples(group, [])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "groups.jsonl"
        path.write_text(json.dumps(group))
        [read] = read_groups(path)
    prefixes = {tuple(each[:end]) for each in found for end in range(1, len(each) + 1)}
    rows, pairs, key_rows = sum(node.work(2) for node in read.nodes())
    assert (rows, pairs) == (len(prefixes), sum(map(len, prefixes)))
    assert [end.begin + end.length for end in read.ends()] == list(map(len, found))
    users = [sum(tuple(each[: len(p)]) == p for each in found) for p in prefixes]
    assert key_rows == sum(min(2, n) for n in users)
