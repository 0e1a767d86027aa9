"""One suite for every kernel: subclass :class:`KernelConformance` and give it a kernel.

All tensors have rows that belong to no task: inputs hold NaN there, outputs a mark that must stay.
dk and dv begin with values to which the kernel adds, and have a layout of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
import torch

from core_attention.ca_task import MaskKind
from core_attention.kernels.protocol import BackwardPart, ForwardPart, Kernel, TaskBatch
from core_attention.score_rule import PLAIN, ScoreRule
from core_attention.shape import AttentionShape
from tests.support.errors import refused
from tests.support.reference import ReferenceResult, reference_attention

UNTOUCHED = -7.0
"""Fills outputs; exact in every dtype."""

OUTPUT_ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Relative error of one rounding to the output's dtype (a whole unit in the last place, as the
value rounded is itself a little off). For float32 it is part of INNER_ROUNDING."""

FLOAT32_ULP = 2.0**-23

RULES = (
    ScoreRule(window=1),
    ScoreRule(window=16),
    ScoreRule(window=130),
    ScoreRule(softcap=1.5),
    ScoreRule(softcap=1.5, window=33),
    ScoreRule(mask=MaskKind.FULL),
    ScoreRule(mask=MaskKind.FULL, softcap=1.5),
)
"""With a softcap that bends scores of size 1, as those here are."""

SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=64, head_dim_v=64, dtype="float32")


@dataclass(frozen=True)
class Task:
    """Queries ``[q_begin, q_end)`` of a document, which see keys ``[0, q_end)``, or all of it."""

    document: int
    q_begin: int
    q_end: int


@dataclass(frozen=True, eq=False)
class Problem:
    """One part with its expected results, row by row of the documents.

    Attributes:
        rule: of its scores.
        forward, backward: the part, to run.
        q_rows: row in q of every document row that a task covers.
        covered: which document rows those are.
        k_rows, dk_rows: rows in k and in dk of every document row.
        dk_before, dv_before: what dk and dv held at first.
        expected: float64 results for all document rows.
    """

    rule: ScoreRule
    forward: ForwardPart
    backward: BackwardPart
    q_rows: torch.Tensor
    covered: torch.Tensor
    k_rows: torch.Tensor
    dk_rows: torch.Tensor
    dk_before: torch.Tensor
    dv_before: torch.Tensor
    expected: ReferenceResult


def whole(lengths: Sequence[int]) -> list[Task]:
    """A task per document."""
    return [Task(document, 0, length) for document, length in enumerate(lengths)]


def make_problem(
    shape: AttentionShape,
    lengths: Sequence[int],
    tasks: Sequence[Task],
    device: torch.device,
    seed: int = 0,
    scale: float = 0.125,
    q_gap: int = 3,
    rule: ScoreRule = PLAIN,
) -> Problem:
    """Random documents of ``lengths``, of which ``tasks`` are run, ``q_gap`` rows apart."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, shape.dtype)
    rows = sum(lengths)
    start = np.cumsum(lengths) - lengths

    def normal(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(rows, heads, dim, generator=generator).to(dtype)

    q, do = normal(shape.num_heads, shape.head_dim), normal(shape.num_heads, shape.head_dim_v)
    k, v = normal(shape.num_heads_kv, shape.head_dim), normal(shape.num_heads_kv, shape.head_dim_v)
    covered = _concatenate([start[t.document] + np.arange(t.q_begin, t.q_end) for t in tasks])
    do_covered = torch.zeros_like(do)
    do_covered[covered] = do[covered]
    expected = reference_attention(q, k, v, lengths, scale, do_covered, rule)

    # Layouts with rows between tasks and documents that belong to nobody.
    q_begin = _spread([t.q_end - t.q_begin for t in tasks], gap=q_gap)
    k_begin, dk_begin = _spread(lengths, gap=2), _spread(lengths, gap=5)
    document = np.array([t.document for t in tasks])
    batch = TaskBatch(
        q_begin=q_begin,
        q_end=q_begin + np.array([t.q_end - t.q_begin for t in tasks]),
        k_begin=k_begin[document],
        k_end=k_begin[document] + np.array([_last_key(t, lengths, rule) for t in tasks]),
        dk_begin=dk_begin[document],
    )
    q_rows = _concatenate(
        [np.arange(b, e) for b, e in zip(batch.q_begin, batch.q_end, strict=True)]
    )
    k_rows, dk_rows = (
        _concatenate([np.arange(b, b + n) for b, n in zip(begin, lengths, strict=True)])
        for begin in (k_begin, dk_begin)
    )

    def scatter(values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        out = torch.full((int(at.max()) + 4, *values.shape[1:]), float("nan"), dtype=values.dtype)
        out[at] = values
        return out.to(device)

    def untouched(like: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return torch.full(like.shape, UNTOUCHED, dtype=out_dtype, device=device)

    delta = (expected.o * do.double()).sum(-1).float()
    dk = torch.randn(int(dk_rows.max()) + 4, *k.shape[1:], generator=generator).to(device)
    dv = torch.randn(int(dk_rows.max()) + 4, *v.shape[1:], generator=generator).to(device)
    part_q, part_k, part_v = scatter(q[covered], q_rows), scatter(k, k_rows), scatter(v, k_rows)
    part_do = scatter(do[covered], q_rows)
    lse = scatter(expected.lse.float()[covered], q_rows)
    forward = ForwardPart(
        q=part_q,
        k=part_k,
        v=part_v,
        o=untouched(part_do, dtype),
        lse=untouched(lse, torch.float32),
        tasks=batch,
    )
    backward = BackwardPart(
        q=part_q,
        k=part_k,
        v=part_v,
        do=part_do,
        lse=lse,
        delta=scatter(delta[covered], q_rows),
        dq=untouched(part_q, dtype),
        dk=dk,
        dv=dv,
        tasks=batch,
    )
    return Problem(
        rule, forward, backward, q_rows, covered, k_rows, dk_rows, dk.clone(), dv.clone(), expected
    )


def _last_key(task: Task, lengths: Sequence[int], rule: ScoreRule) -> int:
    return task.q_end if rule.mask is MaskKind.CAUSAL else lengths[task.document]


def _spread(lengths: Sequence[int], gap: int) -> np.ndarray:
    """Where runs of these lengths begin with ``gap`` rows before each of them."""
    padded = np.array(lengths, dtype=np.int64) + gap
    return np.cumsum(padded) - padded + gap


def _concatenate(runs: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(runs))


AROUND_A_BLOCK = [1, 2, 127, 128, 129, 1]
CUTS = [0, 1, 2, 130, 200, 201, 333, 460, 588, 600, 601, 700]
TINY = [int(n) for n in np.random.default_rng(5).integers(1, 24, 300)]


class KernelConformance:
    """What every kernel must do. Subclasses override the fixture and what is said of them."""

    scale = 0.125

    inner_rounding: ClassVar[dict[str, float]] = {
        "float32": FLOAT32_ULP,
        "bfloat16": FLOAT32_ULP,
        "float16": FLOAT32_ULP,
    }
    """Relative error of one weight or one score gradient inside the kernel, by dtype of the
    tensors: a float32 rounding here; 2**-9 where weights are rounded to bfloat16 for the products.
    """

    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    head_dims: tuple[tuple[int, int], ...] = ((16, 16), (64, 64), (128, 128), (192, 128))

    @pytest.fixture
    def kernel(self) -> Kernel:
        raise NotImplementedError

    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cpu")

    def runs(self, rule: ScoreRule) -> bool:
        """Whether the kernel runs scores under ``rule``; others it must refuse."""
        return True

    def run(self, kernel: Kernel, problems: Sequence[Problem]) -> None:
        (rule,) = {problem.rule for problem in problems}
        kernel.forward([problem.forward for problem in problems], self.scale, rule)
        kernel.backward([problem.backward for problem in problems], self.scale, rule)
        kernel.synchronize()

    def check(self, problem: Problem, shape: AttentionShape) -> None:
        """Compares all outputs of ``problem`` elementwise with the float64 reference."""
        want, at, rows = problem.expected, problem.covered, problem.q_rows
        assert want.dq is not None
        assert want.dk is not None
        assert want.dv is not None
        forward, backward = problem.forward, problem.backward
        inner = self.inner_rounding[shape.dtype]
        rounding = OUTPUT_ROUNDING[shape.dtype]
        # A weight is off by its score's error: |score| <= 8 here, in a dot product of up to 192
        # terms; outputs are weighted means of values of size up to 4.
        mean_error = 64 * inner
        self._compare("o", forward.o, rows, want.o[at], rounding, mean_error)
        # The tanh of a GPU's instruction is as far off again.
        lse_ulps = 64 if problem.rule.softcap is None else 128
        self._compare("lse", forward.lse, rows, want.lse[at], 0.0, lse_ulps * FLOAT32_ULP)
        # Gradients sum over keys or queries: a random walk of sqrt(terms) errors in terms of size
        # up to 16 (a dot product of 192 normal values).
        sum_error = 16 * inner * len(problem.dk_rows) ** 0.5 + mean_error
        self._compare("dq", backward.dq, rows, want.dq[at], rounding, sum_error)
        for name, got, before, expected in (
            ("dk", backward.dk, problem.dk_before, want.dk),
            ("dv", backward.dv, problem.dv_before, want.dv),
        ):
            after = before.double().cpu()
            after[problem.dk_rows] += expected
            everywhere = torch.arange(len(after))
            self._compare(name, got, everywhere, after, FLOAT32_ULP, sum_error)
            outside = torch.ones(len(after), dtype=torch.bool)
            outside[problem.dk_rows] = False
            assert torch.equal(got[outside], before[outside]), f"{name} was written outside tasks"

    @staticmethod
    def _compare(
        name: str,
        got: torch.Tensor,
        rows: torch.Tensor,
        expected: torch.Tensor,
        relative: float,
        absolute: float,
    ) -> None:
        """``got[rows]`` is near ``expected``, its other rows still hold the mark."""
        got = got.cpu()
        torch.testing.assert_close(
            got[rows].double(),
            expected,
            rtol=relative,
            atol=absolute,
            msg=lambda text: f"{name}: {text}",
        )
        outside = torch.ones(len(got), dtype=torch.bool)
        outside[rows] = False
        assert (got[outside] == UNTOUCHED).all(), f"{name} was written outside the tasks' rows"

    def run_and_check(
        self,
        kernel: Kernel,
        device: torch.device,
        shape: AttentionShape,
        lengths: Sequence[int],
        tasks: Sequence[Task],
        rule: ScoreRule = PLAIN,
    ) -> None:
        problem = make_problem(shape, lengths, tasks, device, scale=self.scale, rule=rule)
        self.run(kernel, [problem])
        self.check(problem, shape)

    @pytest.mark.parametrize(
        ("lengths", "tasks"),
        [
            pytest.param(AROUND_A_BLOCK, whole(AROUND_A_BLOCK), id="lengths around a block"),
            pytest.param([700], [Task(0, *each) for each in pairwise(CUTS)], id="many cuts"),
            pytest.param(
                [450, 310, 40],
                [Task(1, 90, 300), Task(0, 449, 450), Task(2, 20, 30), Task(1, 20, 37)],
                id="from the middle of documents",
            ),
            pytest.param([60], [Task(0, at, at + 3) for at in range(0, 60, 3)], id="tiny tasks"),
            pytest.param(TINY, [Task(d, n // 3, n) for d, n in enumerate(TINY)], id="tiny lengths"),
        ],
    )
    def test_documents_and_tasks(
        self, kernel: Kernel, device: torch.device, lengths: list[int], tasks: list[Task]
    ) -> None:
        for dtype in self.dtypes:
            shape = replace(SHAPE, dtype=dtype)
            self.run_and_check(kernel, device, shape, lengths, tasks)

    def test_tasks_far_apart(self, kernel: Kernel, device: torch.device) -> None:
        """As in-place, where most of a rank's rows may be served elsewhere."""
        shape = replace(SHAPE, dtype=self.dtypes[-1])
        tasks = [*whole([70, 9]), Task(2, 30, 41)]
        problem = make_problem(shape, [70, 9, 41], tasks, device, scale=self.scale, q_gap=400)
        self.run(kernel, [problem])
        self.check(problem, shape)

    @pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1), (16, 4)], ids=str)
    def test_head_groups(
        self, kernel: Kernel, device: torch.device, heads: tuple[int, int]
    ) -> None:
        shape = replace(SHAPE, num_heads=heads[0], num_heads_kv=heads[1], dtype=self.dtypes[-1])
        self.run_and_check(kernel, device, shape, [5, 150], [*whole([5]), Task(1, 60, 150)])

    def test_head_dims(self, kernel: Kernel, device: torch.device) -> None:
        for head_dim, head_dim_v in self.head_dims:
            for dtype in self.dtypes:
                shape = replace(SHAPE, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
                self.run_and_check(kernel, device, shape, [9, 140], whole([9, 140]))

    @pytest.mark.parametrize("rule", RULES, ids=str)
    def test_rules_of_scores(self, kernel: Kernel, device: torch.device, rule: ScoreRule) -> None:
        """Lengths around the window, tasks that share a document, and hundreds of tiny ones."""
        shape = replace(SHAPE, dtype=self.dtypes[0])
        if not self.runs(rule):
            with refused():
                kernel.check(shape, rule)
            return
        kernel.check(shape, rule)
        window = rule.window or 70
        lengths = [1, window - 1 or 1, window, window + 1, 400, 3 * window]
        tasks = [*whole(lengths)[:4], *(Task(4, a, b) for a, b in pairwise([0, 1, 130, 257, 400]))]
        for dtype in self.dtypes:
            shape = replace(SHAPE, dtype=dtype)
            self.run_and_check(
                kernel, device, shape, lengths, [*tasks, Task(5, 0, 3 * window)], rule
            )
        tasks = [Task(d, n // 3, n) for d, n in enumerate(TINY)]
        self.run_and_check(kernel, device, shape, TINY, tasks, rule)

    def test_several_parts_in_one_call(self, kernel: Kernel, device: torch.device) -> None:
        shape = replace(SHAPE, dtype=self.dtypes[-1])
        problems = [
            make_problem(shape, lengths, whole(lengths), device, seed, self.scale)
            for seed, lengths in enumerate([[7, 200], [1], [64, 64, 3]])
        ]
        self.run(kernel, problems)
        for problem in problems:
            self.check(problem, shape)

    def test_no_parts_is_no_work(self, kernel: Kernel) -> None:
        kernel.forward([], self.scale)
        kernel.backward([], self.scale)
        kernel.synchronize()

    def test_equal_calls_give_equal_bits(self, kernel: Kernel, device: torch.device) -> None:
        shape = replace(SHAPE, dtype=self.dtypes[-1])
        lengths = [300, 5, 20, 260]
        tasks = [*whole(lengths[:3]), Task(3, 0, 100), Task(3, 100, 190), Task(3, 190, 260)]
        runs = [make_problem(shape, lengths, tasks, device, scale=self.scale) for _ in range(2)]
        for problem in runs:
            self.run(kernel, [problem])
        first, second = runs
        for name in ("o", "lse"):
            assert torch.equal(getattr(first.forward, name), getattr(second.forward, name)), name
        for name in ("dq", "dk", "dv"):
            assert torch.equal(getattr(first.backward, name), getattr(second.backward, name)), name

    def test_large_scores_do_not_overflow(self, kernel: Kernel, device: torch.device) -> None:
        shape = replace(SHAPE, dtype=self.dtypes[0])
        problem = make_problem(shape, [150], whole([150]), device, scale=self.scale)
        problem.forward.q.mul_(64)
        kernel.forward([problem.forward], self.scale)
        kernel.synchronize()
        written = problem.forward.o[problem.q_rows.to(device)]
        assert torch.isfinite(written).all()
        assert torch.isfinite(problem.forward.lse[problem.q_rows.to(device)]).all()
