"""Measures a kernel's cost profile: seconds of a CA-task inside a fused batch, over a grid.

Cells are measured from the cheapest to the dearest, after one of middling size. One that no longer
fits the time budget is extrapolated from the nearest measured one by its query-key pairs. Long
tasks run at nearly the same rate, so it is the dear cells that stand out from the others.
"""

from __future__ import annotations

import logging
import math
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from core_attention.arrays import exclusive_cumsum
from core_attention.ca_task import MaskKind
from core_attention.cost_model import CostProfile, grid_axis
from core_attention.errors import ProfileError
from core_attention.kernels.protocol import BackwardPart, ForwardPart, Kernel, TaskBatch
from core_attention.shape import AttentionShape
from core_attention.whole_file import check_can_write

logger = logging.getLogger(__name__)

PhaseSeconds = tuple[float, float]
"""Seconds of one task, forward and backward."""

Progress = Callable[[int, int], None]
"""Called with (cells done, cells in all)."""

FUSED_Q_ROWS = {"cpu": 256, "cuda": 16384}
"""Query rows that a measured batch has at least, so that short tasks are timed as servers run
them, many to a call; by device type."""

FUSED_KV_ROWS = {"cpu": 2**16, "cuda": 2**17}
"""Keys summed over the tasks of a measured batch, at most: bounds the memory of kernels that keep
dK and dV of every task apart."""

MAX_FUSED_TASKS = {"cpu": 16, "cuda": 256}

CALLS_IN_A_ROW = {"cpu": 1, "cuda": 3}
"""Calls that are timed together: on a GPU the host launches one while another still runs, as in a
step. Calls that take LONG_SECONDS are timed alone, where this matters no more."""

LONG_SECONDS = 0.005

ANCHOR_PAIRS = 2**16
"""Query-key pairs of the document measured first: long enough to run at about the best rate, so
that neither the budget nor the extrapolation rests on the shortest tasks alone."""

MIN_REPEATS, MAX_REPEATS = 3, 9
ENOUGH_SECONDS = 0.005
"""A cell is timed at least MIN_REPEATS times, then until it took so long, at most MAX_REPEATS."""


class Cell(NamedTuple):
    """A task of ``q`` queries and ``kv`` keys, kv >= q."""

    q: int
    kv: int
    mask: MaskKind = MaskKind.CAUSAL

    @property
    def pairs(self) -> int:
        """Query-key pairs."""
        if self.mask is MaskKind.FULL:
            return self.q * self.kv
        return self.q * (2 * self.kv - self.q + 1) // 2

    @property
    def logarithms(self) -> tuple[float, float]:
        return math.log(self.q), math.log(self.kv)


@dataclass(frozen=True, kw_only=True)
class ProfileGrid:
    """A measurement: its grid, and how long it may take.

    Attributes:
        q_tokens, kv_tokens: increasing from 1.
        budget_seconds: cells that do not fit into it are extrapolated.
    """

    q_tokens: tuple[int, ...]
    kv_tokens: tuple[int, ...]
    budget_seconds: float


def _powers_of_two(end: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to ``end``: a coarser grid would misjudge short tasks, see cost_model."""
    return tuple(2**exponent for exponent in range(end.bit_length()))


QUICK_GRIDS = {
    "cpu": ProfileGrid(
        q_tokens=_powers_of_two(4096), kv_tokens=_powers_of_two(16384), budget_seconds=4.0
    ),
    "cuda": ProfileGrid(
        q_tokens=(1, 16, *_powers_of_two(16384)[6:]),
        kv_tokens=(1, 16, *_powers_of_two(131072)[6:]),
        budget_seconds=10.0,
    ),
}
"""The plan of a server that starts without a cached profile, by device type. A GPU computes whole
tiles, so its shortest tasks differ little, and documents that fill its memory are worth the
time."""

FULL_GRID = ProfileGrid(
    q_tokens=_powers_of_two(32768), kv_tokens=_powers_of_two(2**19), budget_seconds=300.0
)
"""The plan of ``distca profile``: once per type of device, kernel and attention shape."""


def load_or_measure(
    directory: Path,
    kernel: Kernel,
    shape: AttentionShape,
    device: torch.device,
    grid: ProfileGrid | None = None,
    progress: Progress | None = None,
) -> CostProfile:
    """The profile kept in ``directory`` for this device, kernel and shape, or a new one, kept.

    A kept file that cannot be used is measured again, with a warning.

    Args:
        grid: what to measure; by default the device's of :data:`QUICK_GRIDS`.
    """
    grid = grid or QUICK_GRIDS[device.type]
    path = directory / profile_file_name(device_name(device), kernel.name, shape)
    if path.exists():
        try:
            return CostProfile.load(path)
        except ProfileError as error:
            logger.warning("measuring the cost profile again: %s", error)
    check_can_write(path)
    profile = measure_profile(
        kernel,
        shape,
        device,
        grid.q_tokens,
        grid.kv_tokens,
        budget_seconds=grid.budget_seconds,
        progress=progress,
    )
    profile.save(path)
    logger.info("cost profile kept in %s", path)
    return profile


def profile_file_name(device: str, kernel: str, shape: AttentionShape) -> str:
    """One file name per device, kernel and attention shape."""
    heads = f"h{shape.num_heads}-kv{shape.num_heads_kv}-d{shape.head_dim}-dv{shape.head_dim_v}"
    words = re.sub(r"[^a-z0-9]+", "-", f"{device} {kernel}".lower()).strip("-")
    softcap = f"-cap{shape.softcap:.12g}" if shape.softcap else ""
    mask = "" if shape.mask is MaskKind.CAUSAL else f"-{shape.mask.name.lower()}"
    return f"{words}-{heads}-{shape.dtype}{softcap}{mask}.json"


def device_name(device: torch.device) -> str:
    """The model of a GPU, or the CPU's model and PyTorch's threads, on which its speed depends."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_model()} ({torch.get_num_threads()} threads)"


def _cpu_model() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return model[1].strip() if model else platform.machine() or "CPU"


def measure_profile(
    kernel: Kernel,
    shape: AttentionShape,
    device: torch.device,
    q_tokens: Sequence[int],
    kv_tokens: Sequence[int],
    *,
    budget_seconds: float,
    progress: Progress | None = None,
) -> CostProfile:
    """Measures ``kernel`` on random data; one cell always, others within the budget.

    Args:
        kernel: what to measure.
        shape: heads, head dims and dtype of the data.
        device: where the data lie.
        q_tokens, kv_tokens: the grid, increasing from 1.
        budget_seconds: a cell is measured if it is expected to end within them.
        progress: called after every cell.
    """
    q_axis, kv_axis = grid_axis(q_tokens, "q_tokens"), grid_axis(kv_tokens, "kv_tokens")
    grid = [[Cell(int(q), max(int(q), int(kv)), shape.mask) for kv in kv_axis] for q in q_axis]
    cells = _in_order_of_measurement({cell for row in grid for cell in row})
    deadline = time.monotonic() + budget_seconds
    measured: dict[Cell, PhaseSeconds] = {}
    for done, cell in enumerate(cells, start=1):
        if not measured or time.monotonic() + _expected_seconds(cell, measured, device) < deadline:
            measured[cell] = _measure(kernel, shape, device, cell)
        if progress is not None:
            progress(done, len(cells))
    _log_what_was_measured(cells, measured, budget_seconds)
    seconds = np.array(
        [[measured.get(c) or _extrapolated(c, measured) for c in row] for row in grid]
    )
    return CostProfile(
        device=device_name(device),
        kernel=kernel.name,
        shape=shape,
        q_tokens=q_axis,
        kv_tokens=kv_axis,
        forward_seconds=seconds[..., 0],
        backward_seconds=seconds[..., 1],
    )


def _log_what_was_measured(
    cells: Sequence[Cell], measured: dict[Cell, PhaseSeconds], budget_seconds: float
) -> None:
    missing = [cell for cell in cells if cell not in measured]
    if missing:
        logger.info(
            "cost profile: %d of %d cells measured; from q %d, kv %d on extrapolated, beyond the "
            "budget of %g s",
            len(measured),
            len(cells),
            missing[0].q,
            missing[0].kv,
            budget_seconds,
        )
    else:
        logger.info("cost profile: all %d cells measured", len(cells))


def _in_order_of_measurement(cells: set[Cell]) -> list[Cell]:
    """The anchor, then the others from the cheapest to the dearest."""
    by_cost = sorted(cells, key=lambda cell: (cell.pairs, cell))
    whole_documents = (cell for cell in by_cost if cell.q == cell.kv)
    anchor = min(whole_documents, key=lambda cell: abs(math.log(cell.pairs / ANCHOR_PAIRS)))
    return [anchor, *(cell for cell in by_cost if cell != anchor)]


def _extrapolated(cell: Cell, measured: dict[Cell, PhaseSeconds]) -> PhaseSeconds:
    """The nearest measured cell scaled down by its pairs, or, where the cell has more pairs, with
    those added at the best measured rate."""
    near = min(measured, key=lambda m: (math.dist(m.logarithms, cell.logarithms), m))
    more_pairs = max(0, cell.pairs - near.pairs)
    forward, backward = (
        measured[near][phase] * min(1.0, cell.pairs / near.pairs)
        + more_pairs * min(seconds[phase] / m.pairs for m, seconds in measured.items())
        for phase in range(2)
    )
    return forward, backward


def _expected_seconds(
    cell: Cell, measured: dict[Cell, PhaseSeconds], device: torch.device
) -> float:
    """How long :func:`_measure` will take at least."""
    one_task = sum(_extrapolated(cell, measured))
    seconds = _n_tasks(cell, device) * one_task
    return (1 + MIN_REPEATS * _calls_in_a_row(seconds, device)) * seconds


def _calls_in_a_row(seconds: float, device: torch.device) -> int:
    """Calls that are timed together if one takes ``seconds``."""
    return 1 if seconds > LONG_SECONDS else CALLS_IN_A_ROW[device.type]


def _n_tasks(cell: Cell, device: torch.device) -> int:
    """Tasks of a measured batch: enough rows to fill the device, within the memory for keys."""
    enough = -(-FUSED_Q_ROWS[device.type] // cell.q)
    return max(1, min(enough, FUSED_KV_ROWS[device.type] // cell.kv, MAX_FUSED_TASKS[device.type]))


def _measure(
    kernel: Kernel, shape: AttentionShape, device: torch.device, cell: Cell
) -> PhaseSeconds:
    """Forward and backward seconds of one task of a fused batch of tasks of this size."""
    lengths = [(cell.q, cell.kv)] * _n_tasks(cell, device)
    forward, backward = random_parts(shape, lengths, device)
    scale = shape.head_dim**-0.5
    forward_seconds = _median_seconds(
        kernel, lambda: kernel.forward([forward], scale, shape.rule), device
    )
    backward_seconds = _median_seconds(
        kernel, lambda: kernel.backward([backward], scale, shape.rule), device
    )
    return forward_seconds / len(lengths), backward_seconds / len(lengths)


def _median_seconds(kernel: Kernel, call: Callable[[], None], device: torch.device) -> float:
    """Seconds of one call, among as many as are timed together on ``device``."""
    call()
    kernel.synchronize()
    times: list[float] = []
    spent = 0.0
    while len(times) < MIN_REPEATS or (spent < ENOUGH_SECONDS and len(times) < MAX_REPEATS):
        in_a_row = _calls_in_a_row(max(times, default=0.0), device)
        begin = time.perf_counter()
        for _ in range(in_a_row):
            call()
        kernel.synchronize()
        seconds = time.perf_counter() - begin
        spent += seconds
        times.append(seconds / in_a_row)
    return statistics.median(times)


def random_parts(
    shape: AttentionShape, lengths: Sequence[tuple[int, int]], device: torch.device
) -> tuple[ForwardPart, BackwardPart]:
    """A fused batch of random data; both parts share q, k, v and lse.

    Run the forward part first: the backward part's lse is its output.

    Args:
        shape: heads, head dims and dtype.
        lengths: (queries, keys) of each task. Tasks have rows of q of their own and share the
            first rows of k and v, like the tasks of one document.
        device: where the tensors lie.
    """
    queries = np.array([q for q, _ in lengths], dtype=np.int64)
    keys = np.array([kv for _, kv in lengths], dtype=np.int64)
    q_begin, zero = exclusive_cumsum(queries), np.zeros_like(keys)
    tasks = TaskBatch(q_begin, q_begin + queries, zero, keys, zero)
    n_q, n_k = int(queries.sum()), int(keys.max())
    generator = torch.Generator(device).manual_seed(n_q)

    def normal(rows: int, heads: int, dim: int) -> torch.Tensor:
        values = torch.randn(rows, heads, dim, device=device, generator=generator)
        return values.to(getattr(torch, shape.dtype))

    q = normal(n_q, shape.num_heads, shape.head_dim)
    k = normal(n_k, shape.num_heads_kv, shape.head_dim)
    v = normal(n_k, shape.num_heads_kv, shape.head_dim_v)
    do = normal(n_q, shape.num_heads, shape.head_dim_v)
    lse = torch.zeros(n_q, shape.num_heads, device=device)
    return (
        ForwardPart(q, k, v, torch.empty_like(do), lse, tasks),
        BackwardPart(
            q=q,
            k=k,
            v=v,
            do=do,
            lse=lse,
            delta=torch.zeros_like(lse),
            dq=torch.empty_like(q),
            dk=torch.zeros(k.shape, device=device),
            dv=torch.zeros(v.shape, device=device),
            tasks=tasks,
        ),
    )
