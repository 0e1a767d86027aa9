"""The cost model: seconds of a CA-task on one kind of device, from a measured grid.

A profile holds seconds over (q length, kv length), forward and backward apart (paper, section 4.2).
Between grid points it interpolates bilinearly in the logarithms of both lengths the *rate*, seconds
per query-key pair, and multiplies by the task's exact number of pairs: rates vary slowly where
seconds vary with the product of both lengths, so a coarse grid (factors of two) stays accurate.
Where a task is all overhead, its rate falls like 1 / pairs; on a grid of factors of two the error
is then 0.4% in the median and within -12% and +22% (near the diagonal), on factors of four 11%
and up to +77%.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from core_attention.arrays import Float64Array, Int64Array, frozen, int64_column
from core_attention.ca_task import Phase, qk_pairs
from core_attention.errors import ProfileError
from core_attention.shape import AttentionShape
from core_attention.whole_file import write_whole

PROFILE_VERSION = 1

MOST_TOKENS = 2**31
"""The most tokens of a grid: the query-key pairs of as many still fit into 64 bits."""

LEAST_SECONDS, MOST_SECONDS = 1e-20, 1e20
"""The range of a cell, far beyond any device and task. A profile comes from another process, and
planners divide by its rates and add up its seconds: neither may leave the range of numbers."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CostProfile:
    """Seconds of a CA-task over a grid of (q length, kv length) for one device and shape.

    A task has q queries, the last of its kv keys being the last query's own: kv >= q. Cells with
    kv < q describe no task; they hold the value for kv = q, so that interpolation near the
    diagonal needs no special case.

    Attributes:
        device: what was measured, for example ``"NVIDIA H200"``.
        kernel: name of the kernel.
        shape: heads, head dims and dtype it holds for.
        q_tokens: ``[n_q]`` increasing, from 1.
        kv_tokens: ``[n_kv]`` increasing, from 1.
        forward_seconds, backward_seconds: ``[n_q, n_kv]``, of one task inside a fused batch.
    """

    device: str
    kernel: str
    shape: AttentionShape
    q_tokens: Int64Array
    kv_tokens: Int64Array
    forward_seconds: Float64Array
    backward_seconds: Float64Array

    def __post_init__(self) -> None:
        for name in ("q_tokens", "kv_tokens"):
            object.__setattr__(self, name, grid_axis(getattr(self, name), name))
        grid = (len(self.q_tokens), len(self.kv_tokens))
        for name in ("forward_seconds", "backward_seconds"):
            try:
                seconds = np.array(getattr(self, name), dtype=np.float64)
            except (TypeError, ValueError) as error:
                raise ProfileError(f"{name} is no table of numbers: {error}") from error
            if seconds.shape != grid:
                raise ProfileError(f"{name} has shape {seconds.shape}, the grid is {grid}")
            bad = np.argwhere(~((seconds >= LEAST_SECONDS) & (seconds <= MOST_SECONDS)))
            if len(bad):
                i, j = bad[0]
                raise ProfileError(
                    f"{name} at q {self.q_tokens[i]}, kv {self.kv_tokens[j]} is {seconds[i, j]}; "
                    f"every cell must be a number of {LEAST_SECONDS:g} to {MOST_SECONDS:g}: "
                    "measure the profile again"
                )
            object.__setattr__(self, name, frozen(seconds))

    def seconds(self, q_length: ArrayLike, kv_length: ArrayLike, phase: Phase) -> Float64Array:
        """Seconds of tasks with ``q_length`` queries and ``kv_length`` keys (arrays broadcast).

        Beyond the grid the nearest rate holds. A task of no queries takes no time.
        """
        q = np.asarray(q_length, dtype=np.float64)
        kv = np.asarray(kv_length, dtype=np.float64)
        pairs = qk_pairs(q, kv, self.shape.mask)  # type: ignore[arg-type]
        return np.asarray(pairs * self._rate(np.maximum(q, 1), np.maximum(kv, 1), phase))

    def _rate(self, q: Float64Array, kv: Float64Array, phase: Phase) -> Float64Array:
        """Seconds per query-key pair, bilinear in (log q, log kv)."""
        log_q, log_kv = self._log_grid
        i, a = _cell(log_q, np.log(q))
        j, b = _cell(log_kv, np.log(kv))
        rate = self._rates[phase]
        return np.asarray(
            (1 - a) * ((1 - b) * rate[i, j] + b * rate[i, j + 1])
            + a * ((1 - b) * rate[i + 1, j] + b * rate[i + 1, j + 1])
        )

    @cached_property
    def _log_grid(self) -> tuple[Float64Array, Float64Array]:
        """Logarithms of the grid's q and kv lengths."""
        return np.log(self.q_tokens), np.log(self.kv_tokens)

    @cached_property
    def _rates(self) -> dict[Phase, Float64Array]:
        """``[n_q, n_kv]`` seconds per query-key pair at the grid points."""
        kv = np.maximum(self.kv_tokens[None, :], self.q_tokens[:, None])
        pairs = qk_pairs(self.q_tokens[:, None], kv, self.shape.mask)
        return {
            Phase.FORWARD: self.forward_seconds / pairs,
            Phase.BACKWARD: self.backward_seconds / pairs,
        }

    def to_json(self) -> str:
        """The profile as a JSON text that :meth:`from_json` reads."""
        return json.dumps(
            {
                "version": PROFILE_VERSION,
                "device": self.device,
                "kernel": self.kernel,
                "shape": vars(self.shape),
                "q_tokens": self.q_tokens.tolist(),
                "kv_tokens": self.kv_tokens.tolist(),
                "forward_seconds": self.forward_seconds.tolist(),
                "backward_seconds": self.backward_seconds.tolist(),
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> CostProfile:
        """Reads what :meth:`to_json` wrote."""
        try:
            fields: dict[str, Any] = json.loads(text)
            version = fields.pop("version")
            shape = AttentionShape(**fields.pop("shape"))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ProfileError(f"this is no cost profile: {error}") from error
        if version != PROFILE_VERSION:
            raise ProfileError(f"profile version {version!r}; this release reads {PROFILE_VERSION}")
        try:
            return cls(shape=shape, **fields)
        except TypeError as error:
            raise ProfileError(f"this is no cost profile: {error}") from error

    def save(self, path: Path) -> None:
        """Writes the profile to ``path``, whole or not at all; others may write it meanwhile."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> CostProfile:
        """Reads the profile at ``path``.

        Raises:
            ProfileError, OSError: the file holds no valid profile, or cannot be read.
        """
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ProfileError(f"{path}: this is no cost profile: {error}") from error
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from error


def grid_axis(tokens: Iterable[int] | Int64Array, name: str) -> Int64Array:
    """The lengths along one axis of a profile's grid, checked."""
    try:
        column = int64_column(tokens, name)
    except (TypeError, ValueError) as error:
        raise ProfileError(str(error)) from error
    if len(column) < 2 or column[0] != 1 or (np.diff(column) <= 0).any():
        raise ProfileError(
            f"{name} must increase strictly from 1 and have 2 values or more, got "
            f"{column[:8].tolist()}"
        )
    if column[-1] > MOST_TOKENS:
        raise ProfileError(
            f"{name} goes up to {column[-1]}; a grid ends at {MOST_TOKENS}, the longest document, "
            "or before: leave longer ones out"
        )
    return column


def _cell(grid: Float64Array, at: Float64Array) -> tuple[Int64Array, Float64Array]:
    """The cell of each point and where in it the point lies, clamped to [0, 1]."""
    index = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, len(grid) - 2)
    fraction = (at - grid[index]) / (grid[index + 1] - grid[index])
    return index, np.clip(fraction, 0.0, 1.0)
