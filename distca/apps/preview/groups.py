"""Groups of samples with a common prompt, by their lengths: what a tree of each one saves."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from core_attention.ca_task import causal_qk_pairs
from core_attention.manifest import MAX_DOCUMENT_TOKENS
from distca.apps.preview.sections import PageSection
from distca.apps.simulator.model import ModelSpec

_SHOWN = 16
_MEGA, _GIGA = 1e6, 1e9
_HIDDEN_BYTES = 2  # Of an element of hidden states, in bfloat16.

_HEAD = ("group", "tokens", "rows", "linear", "attention", "all", "memory, GB", "MB a layer")


@dataclass(frozen=True)
class Node:
    """A prompt or a completion: ``length`` tokens behind ``begin`` others, and what continues it;
    nothing does where a sample ends."""

    begin: int
    length: int
    below: Sequence[Node] = ()

    def nodes(self) -> Iterator[Node]:
        """Yield it and all below it."""
        yield self
        for each in self.below:
            yield from each.nodes()

    def ends(self) -> list[Node]:
        """Return the last node of each sample."""
        return [node for node in self.nodes() if not node.below]

    def work(self, n_servers: int) -> Any:
        """Int64 ``[3]``: rows, pairs of a query and a key, and rows of keys that travel, of this
        node alone."""
        begin, end = np.array([[self.begin], [self.begin + self.length]])
        pairs = int(causal_qk_pairs(begin, end)[0])
        return np.array([self.length, pairs, self.length * min(n_servers, len(self.ends()))])


def read_groups(path: Path) -> list[Node]:
    """Read groups, one a line of JSON: ``{"prompt": 32768, "completions": [8192, 8192]}``, where a
    completion may be such a group itself."""
    groups = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"groups file {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                groups.append(_node(json.loads(line), 0, where))
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"{where}: no JSON: {error}") from error
    if not groups:
        raise ValueError(f"groups file {path} has no line; give one group a line")
    return groups


def _node(given: Any, begin: int, where: str) -> Node:
    length, below = given, []
    if isinstance(given, dict) and given.keys() == {"prompt", "completions"}:
        length, below = given["prompt"], given["completions"]
    is_length = isinstance(length, int) and 1 <= length <= MAX_DOCUMENT_TOKENS - begin
    if not is_length or isinstance(length, bool) or not isinstance(below, list):
        raise ValueError(
            f"{where}: {reprlib.repr(given)} is no group; write its tokens, 1 or more, or "
            '{"prompt": tokens, "completions": [groups]}'
        )
    return Node(begin, length, [_node(each, begin + length, where) for each in below])


def groups_section(groups: Sequence[Node], model: ModelSpec, n_servers: int) -> PageSection:
    """Show costs of separate rows over those of trees, group by group and of all."""
    separate = [
        sum(Node(0, end.begin + end.length).work(n_servers) for end in group.ends())
        for group in groups
    ]
    trees = [sum(node.work(n_servers) for node in group.nodes()) for group in groups]
    names = [f"{len(group.ends())} samples, {group.length} in common" for group in groups]
    rows = [_row(*each, model) for each in zip(names, separate, trees, strict=True)][:_SHOWN]
    note = (
        "Separate rows / trees, by formulas. all: operations of layers, attention and head, "
        "forward and backward. memory: inputs of all layers, which full recomputation keeps. MB a "
        "layer, if all of them travel: Q and O of every row, and K and V once for each server that "
        f"computes below them, at most {n_servers}."
    )
    total = _row(f"all {len(groups)}", sum(separate), sum(trees), model)
    return PageSection(f"Trees, {model.name}", (note,), _HEAD, [*rows, total])


def _row(name: str, separate: Any, tree: Any, model: ModelSpec) -> Sequence[str]:
    before, after = _costs(separate, model), _costs(tree, model)
    ratios = [f"/ {a / b:.1f}" for a, b in zip(before, after, strict=True)]
    gigabytes, megabytes = (
        f"{a / unit:.{digits}f} -> {b / unit:.{digits}f}"
        for a, b, unit, digits in zip(before[3:], after[3:], (_GIGA, _MEGA), (1, 0), strict=True)
    )
    return name, str(separate[0]), str(tree[0]), *ratios[:3], gigabytes, megabytes


def _costs(work: Any, model: ModelSpec) -> list[float]:
    """Rows, pairs, operations, bytes of memory, and bytes that travel in a layer, forward."""
    rows, pairs, key_rows = work.tolist()
    shape, layers = model.attention_shape, model.n_layers
    linear = 3 * rows * (layers * model.linear_flops_per_token + model.head_flops_per_token)
    attention = layers * (shape.qk_flops(pairs) + shape.qk_flops(pairs, backward=True))
    moved = rows * (shape.q_row_bytes + shape.o_row_bytes) + key_rows * shape.kv_row_bytes
    memory = rows * layers * model.hidden_size * _HIDDEN_BYTES
    return [rows, pairs, linear + attention, memory, moved]
