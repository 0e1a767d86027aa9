"""The GPU kernels pass the conformance suite; how their launches are laid out is tested anywhere.

Matrix products take 16-bit weights, so results are compared with float64 by norm, too: a relative
error of a few roundings, where the suite's elementwise bounds allow for the worst sum of them.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from core_attention.arrays import exclusive_cumsum
from core_attention.ca_task import Phase
from core_attention.kernels import fa2, fa4
from core_attention.kernels.gpu_launches import (
    MAX_TASKS,
    SUM_ROWS,
    LaunchCache,
    gradient_blocks,
    head_groups,
)
from core_attention.kernels.protocol import BackwardPart, ForwardPart, Kernel, TaskBatch
from core_attention.kernels.select import select_kernel
from core_attention.score_rule import PLAIN, ScoreRule
from core_attention.shape import AttentionShape, parse_shape
from tests.support.errors import refused
from tests.unit.core_attention.kernel_conformance import (
    SHAPE,
    KernelConformance,
    Problem,
    Task,
    make_problem,
    whole,
)

HEAD_DIMS = (8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256)

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
LLAMA = AttentionShape(num_heads=32, num_heads_kv=8, head_dim=128, head_dim_v=128, dtype="bfloat16")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# --- launches ---------------------------------------------------------------------------------


def batch_of(ranges: Sequence[tuple[int, int, int, int, int]]) -> TaskBatch:
    columns = np.array(ranges, dtype=np.int64).reshape(-1, 5).T
    return TaskBatch(*columns)


def random_batch(seed: int) -> TaskBatch:
    """Tasks of documents that share keys, queries in random order with gaps."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 60, 6)
    k_begin = exclusive_cumsum(lengths) + np.arange(6) * int(generator.integers(0, 3))
    tasks = []
    for document, length in enumerate(lengths.tolist()):
        n_cuts = int(generator.integers(0, min(4, length)))
        cuts = np.sort(generator.choice(np.arange(1, length), n_cuts, replace=False))
        bounds = [0, *cuts.tolist(), length]
        tasks += [(document, b, e) for b, e in itertools.pairwise(bounds)]
    tasks = [tasks[i] for i in generator.permutation(len(tasks))[: len(tasks) - 1]]
    row, ranges = 0, []
    for document, begin, end in tasks:
        row += int(generator.integers(0, 3))
        first = int(k_begin[document])
        ranges.append((row, row + end - begin, first, first + end, first + 7))
        row += end - begin
    return batch_of([ranges[i] for i in generator.permutation(len(ranges))])


@pytest.mark.parametrize(
    ("n_keys", "n_groups"), [(1, 1), (100, 1), (101, 2), (250, 3), (350, 6), (10**6, 6)]
)
def test_heads_of_a_task_above_the_workspace_are_taken_in_groups(
    n_keys: int, n_groups: int
) -> None:
    groups = head_groups(12, 6, n_keys, workspace_keys=100)
    assert len(groups) == n_groups
    assert [h for heads, _ in groups for h in range(12)[heads]] == list(range(12))
    assert [h for _, heads_kv in groups for h in range(6)[heads_kv]] == list(range(6))
    for heads, heads_kv in groups:
        assert {h // 2 for h in range(12)[heads]} == set(range(6)[heads_kv])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("gaps", [True, False])
@pytest.mark.parametrize("workspace_keys", [1, 100, 10_000])
def test_launches_cover_every_task_once(seed: int, gaps: bool, workspace_keys: int) -> None:
    tasks = random_batch(seed)
    cache = LaunchCache(CPU, gaps=gaps, workspace_keys=workspace_keys)
    want = sorted(zip(*(column.tolist() for column in dataclasses.astuple(tasks)[:4]), strict=True))
    n_rows = int(max(tasks.q_end.max(), tasks.k_end.max()))
    rows = torch.arange(n_rows)
    for phase in Phase:
        got = []
        for launch in cache.launches(tasks, phase):
            q_rows, k_rows = launch.q.take(rows), launch.k.take(rows)
            n_tasks = len(launch.seqused_q)
            begin_q, begin_k = launch.cu_seqlens_q[:-1], launch.cu_seqlens_k[:-1]
            if not gaps:
                assert torch.equal(launch.cu_seqlens_q.diff(), launch.seqused_q)
            if phase is Phase.BACKWARD:
                assert (begin_k[1:] >= (begin_k + launch.seqused_k)[:-1]).all()
                assert n_tasks == 1 or launch.seqused_k.sum() <= workspace_keys
                assert (begin_q[1:] >= (begin_q + launch.seqused_q)[:-1]).all()
            elif gaps:
                assert (launch.seqused_k.diff() <= 0).all()
            assert launch.max_seqlen_q == launch.seqused_q.max()
            assert launch.max_seqlen_k == launch.seqused_k.max()
            covered: list[int] = []
            for q, n_q, k, n_k in zip(
                begin_q.tolist(),
                launch.seqused_q.tolist(),
                begin_k.tolist(),
                launch.seqused_k.tolist(),
                strict=True,
            ):
                task_q, task_k = q_rows[q : q + n_q].tolist(), k_rows[k : k + n_k].tolist()
                assert task_q == list(range(task_q[0], task_q[0] + n_q))
                assert task_k == list(range(task_k[0], task_k[0] + n_k))
                got.append((task_q[0], task_q[0] + n_q, task_k[0], task_k[0] + n_k))
                covered += range(q, q + n_q)
            if launch.written is None:
                assert sorted(covered) == list(range(len(q_rows)))
            else:
                assert launch.written.tolist() == covered
        assert sorted(got) == want


def test_launches_have_a_limited_number_of_tasks() -> None:
    n_tasks = 2 * MAX_TASKS + 1
    row = np.arange(n_tasks, dtype=np.int64)
    tasks = TaskBatch(row, row + 1, row, row + 1, row)
    for phase in Phase:
        launches = LaunchCache(CPU, gaps=True).launches(tasks, phase)
        assert [len(launch.seqused_q) for launch in launches] == [MAX_TASKS, MAX_TASKS, 1]


def test_launches_are_made_once_and_die_with_their_batch() -> None:
    cache = LaunchCache(CPU, gaps=True)
    tasks = random_batch(0)
    launches = cache.launches(tasks, Phase.FORWARD)
    assert cache.launches(tasks, Phase.FORWARD) is launches
    held = weakref.ref(launches[0])
    del tasks, launches
    gc.collect()
    assert held() is None


def test_whole_documents_are_read_in_place() -> None:
    tasks = batch_of([(0, 30, 0, 30, 0), (30, 50, 30, 50, 30)])
    for gaps in (True, False):
        (launch,) = LaunchCache(CPU, gaps=gaps).launches(tasks, Phase.BACKWARD)
        assert launch.k.index is None
        assert launch.q.index is None


@pytest.mark.parametrize("seed", range(20))
def test_gradient_blocks_add_every_row_of_every_task_in_order(seed: int) -> None:
    tasks = random_batch(seed)
    length = tasks.k_end - tasks.k_begin
    source_begin = exclusive_cumsum(length)
    blocks, shifts = gradient_blocks(tasks.dk_begin, length, source_begin)
    got: dict[int, list[int]] = {}
    for row, n_rows, begin, end in blocks.tolist():
        assert 1 <= n_rows <= SUM_ROWS
        assert begin < end
        for target in range(row, row + n_rows):
            assert target not in got
            got[target] = (target + shifts[begin:end]).tolist()
    want: dict[int, list[int]] = {}
    for target, source, n_rows in zip(tasks.dk_begin, source_begin, length, strict=True):
        for at in range(int(n_rows)):
            want.setdefault(int(target) + at, []).append(int(source) + at)
    assert got == want


# --- shapes and devices -----------------------------------------------------------------------

HOPPER, BLACKWELL, ADA = (9, 0), (10, 0), (8, 9)


@pytest.mark.parametrize(
    ("check", "change", "capability", "fits"),
    [
        (fa4.check_shape, {"dtype": "float32"}, HOPPER, False),
        (fa4.check_shape, {"head_dim": 100, "head_dim_v": 100}, HOPPER, False),
        (fa4.check_shape, {"head_dim": 264, "head_dim_v": 264}, HOPPER, False),
        (fa4.check_shape, {"head_dim": 256, "head_dim_v": 256}, BLACKWELL, False),
        (fa4.check_shape, {"head_dim": 192}, BLACKWELL, False),
        (fa4.check_shape, {"head_dim": 192, "num_heads_kv": 32}, BLACKWELL, True),
        (fa4.check_shape, {"head_dim": 192, "num_heads_kv": 32}, HOPPER, True),
        (fa4.check_shape, {"head_dim": 192}, HOPPER, True),
        (fa4.check_shape, {"head_dim_v": 256}, HOPPER, True),
        (fa2.check_shape, {"dtype": "float32"}, HOPPER, False),
        (fa2.check_shape, {"head_dim": 192}, HOPPER, False),
        (fa2.check_shape, {"head_dim": 100, "head_dim_v": 100}, HOPPER, False),
        (fa2.check_shape, {"head_dim": 256, "head_dim_v": 256}, ADA, False),
    ],
)
def test_a_kernel_refuses_what_it_cannot_run(
    check: Any, change: dict[str, Any], capability: tuple[int, int], fits: bool
) -> None:
    with nullcontext() if fits else refused():
        check(replace(LLAMA, **change), capability)


@pytest.mark.parametrize(
    ("dims", "forward", "backward"),
    [
        ((128, 128), (128, 128), (128, 128)),
        ((80, 80), (80, 80), (96, 96)),
        ((8, 8), (8, 8), (32, 32)),
        ((64, 48), (64, 64), (64, 64)),
        ((96, 128), (128, 128), (128, 128)),
        ((192, 128), (192, 128), (192, 192)),
        ((256, 256), (256, 256), (256, 256)),
    ],
)
def test_the_library_gets_head_dims_for_which_it_is_right(
    dims: tuple[int, int], forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    shape = replace(LLAMA, head_dim=dims[0], head_dim_v=dims[1])
    assert fa4.library_dims(shape, HOPPER, Phase.FORWARD) == forward
    assert fa4.library_dims(shape, HOPPER, Phase.BACKWARD) == backward
    if dims == (192, 128):  # Latent attention has as many heads of keys, and keeps its dims.
        latent = replace(shape, num_heads_kv=32)
        for capability, phase in itertools.product((HOPPER, BLACKWELL), Phase):
            assert fa4.library_dims(latent, capability, phase) == dims


def test_a_softcap_is_refused_where_no_kernel_has_it() -> None:
    rule = ScoreRule(softcap=50.0)
    fa4.check_shape(LLAMA, HOPPER, rule)
    fa4.check_shape(LLAMA, BLACKWELL, rule)
    with refused():
        fa2.check_shape(LLAMA, HOPPER, rule)


# --- kernels on a GPU -------------------------------------------------------------------------


class FiniteBetweenTasks:
    """A kernel whose inputs hold large numbers, in place of NaN, in rows that belong to no task.

    FlashAttention-4 reads whole tiles and multiplies what is beside a task by zero, so NaN there
    comes through. Where rows of others leak into a result, these numbers spoil it.
    """

    BESIDE = 1e4

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.name = kernel.name
        self.check = kernel.check
        self.warm_up = kernel.warm_up
        self.prepare = kernel.prepare
        self.synchronize = kernel.synchronize

    def forward(self, parts: Sequence[ForwardPart], scale: float, rule: ScoreRule = PLAIN) -> None:
        self.kernel.forward([self._finite(part) for part in parts], scale, rule)

    def backward(
        self, parts: Sequence[BackwardPart], scale: float, rule: ScoreRule = PLAIN
    ) -> None:
        self.kernel.backward([self._finite(part) for part in parts], scale, rule)

    def _finite(self, part: Any) -> Any:
        inputs = {"q", "k", "v", "do"} & {field.name for field in dataclasses.fields(part)}
        finite = {name: getattr(part, name).nan_to_num(self.BESIDE) for name in inputs}
        return replace(part, **finite)


def bare(kernel: Any) -> Any:
    return kernel.kernel if isinstance(kernel, FiniteBetweenTasks) else kernel


class GpuConformance(KernelConformance):
    dtypes = ("float16", "bfloat16")

    # Weights and score gradients are rounded to the dtype for the matrix products.
    inner_rounding: ClassVar[dict[str, float]] = {"bfloat16": 2.0**-9, "float16": 2.0**-12}

    FEWEST_ROWS = 64
    """Norms average over this many rows; a single one has gradients of zero, plus rounding."""

    @pytest.fixture
    def device(self) -> torch.device:
        return GPU

    def check(self, problem: Problem, shape: AttentionShape) -> None:
        """By element as everywhere, and by norm, which is much sharper."""
        super().check(problem, shape)
        if len(problem.covered) < self.FEWEST_ROWS:
            return
        want, at, rows = problem.expected, problem.covered, problem.q_rows
        # Output rounding, and inner roundings of which some cancel: 4 roundings are ample.
        bound = 4 * {"bfloat16": 2.0**-9, "float16": 2.0**-12}[shape.dtype]
        forward, backward = problem.forward, problem.backward
        dk = backward.dk.cpu().double() - problem.dk_before.cpu().double()
        dv = backward.dv.cpu().double() - problem.dv_before.cpu().double()
        assert want.dq is not None
        assert want.dk is not None
        assert want.dv is not None
        for name, got, expected in (
            ("o", forward.o.cpu()[rows].double(), want.o[at]),
            ("dq", backward.dq.cpu()[rows].double(), want.dq[at]),
            ("dk", dk[problem.dk_rows], want.dk),
            ("dv", dv[problem.dk_rows], want.dv),
        ):
            if problem.rule.window == 1 and name in ("dq", "dk"):
                continue  # With one key there is no gradient: the bound of elements says all.
            error = float((got - expected).norm() / expected.norm())
            assert error <= bound, f"{name} is off by {error:.2e} relative, more than {bound:.2e}"

    @pytest.mark.parametrize("num_heads_kv", [2, 4])
    @pytest.mark.parametrize("head_dim", [64, 80])
    def test_a_small_workspace_gives_the_same_gradients(
        self, kernel: Any, device: torch.device, num_heads_kv: int, head_dim: int
    ) -> None:
        """Launches have one task each, and take their heads one key head after another."""
        tasks = [Task(0, 0, 300), Task(0, 300, 500), Task(1, 0, 90), Task(0, 500, 700)]
        shape = parse_shape(f"4:{num_heads_kv}:{head_dim}:bfloat16")
        problems = [
            make_problem(shape, [700, 90], tasks, device, scale=self.scale) for _ in range(2)
        ]
        small = type(bare(kernel))(device, deterministic=True, workspace_keys=1)
        self.run(kernel, problems[:1])
        self.run(FiniteBetweenTasks(small), problems[1:])
        first, second = (problem.backward for problem in problems)
        assert torch.equal(first.dq, second.dq)
        assert torch.equal(first.dk, second.dk)
        assert torch.equal(first.dv, second.dv)

    def test_a_layers_call_waits_for_nothing(self, kernel: Any, device: torch.device) -> None:
        tasks = [Task(0, 0, 300), Task(1, 0, 90), Task(0, 300, 700)]
        shape = replace(SHAPE, dtype="bfloat16")
        first, second = (
            make_problem(shape, [700, 90], tasks, device, scale=self.scale) for _ in range(2)
        )
        self.run(kernel, [first])
        plain = bare(kernel)
        torch.cuda.set_sync_debug_mode("error")
        try:
            plain.forward([second.forward], self.scale)
            plain.backward([second.backward], self.scale)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.parametrize("group_size", [1, 2])
    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_every_head_dim_that_is_not_refused(
        self, kernel: Kernel, device: torch.device, head_dim: int, group_size: int
    ) -> None:
        shape = parse_shape(f"4:{4 // group_size}:{head_dim}:bfloat16")
        try:
            kernel.check(shape)
        except ValueError:
            assert head_dim < 32 or head_dim > 192
            return
        lengths = [9, 1, 14, 300, 129]
        tasks = [*whole(lengths)[:3], Task(3, 0, 100), Task(3, 100, 300), Task(4, 0, 129)]
        self.run_and_check(kernel, device, shape, lengths, tasks)

    @pytest.mark.parametrize("seed", range(3))
    def test_random_documents_cut_at_random(
        self, kernel: Kernel, device: torch.device, seed: int
    ) -> None:
        generator = np.random.default_rng(seed)
        lengths = generator.integers(1, 1200, 8).tolist()
        tasks = []
        for document, length in enumerate(lengths):
            cuts = sorted({0, length, *generator.integers(0, length + 1, 3).tolist()})
            tasks += [Task(document, b, e) for b, e in itertools.pairwise(cuts)]
        tasks = [tasks[i] for i in generator.permutation(len(tasks))[:-2]]
        shape = replace(LLAMA, num_heads=8, num_heads_kv=2)
        self.run_and_check(kernel, device, shape, lengths, tasks)


@pytest.mark.gpu
@needs_gpu
class TestFa4Kernel(GpuConformance):
    head_dims = ((64, 64), (96, 96), (128, 128), (256, 256))

    @pytest.fixture(scope="class")
    def fa4_kernel(self) -> Kernel:
        pytest.importorskip("flash_attn.cute")
        return fa4.Fa4Kernel(GPU, deterministic=True)

    @pytest.fixture
    def kernel(self, fa4_kernel: Kernel) -> Kernel:
        return FiniteBetweenTasks(fa4_kernel)

    @pytest.mark.parametrize("dims", [(192, 128), (64, 48), (32, 64)])
    @pytest.mark.parametrize("num_heads_kv", [4, 2])
    def test_different_head_dims(
        self, kernel: Kernel, device: torch.device, dims: tuple[int, int], num_heads_kv: int
    ) -> None:
        shape = replace(SHAPE, head_dim=dims[0], head_dim_v=dims[1], dtype="bfloat16")
        shape = replace(shape, num_heads_kv=num_heads_kv)
        if num_heads_kv == 4 or torch.cuda.get_device_capability(device)[0] == 9:
            tasks = [*whole([9, 140])[:1], Task(1, 30, 70), Task(1, 70, 140)]
            self.run_and_check(kernel, device, shape, [9, 140], tasks)

    def test_it_is_the_first_choice(self) -> None:
        pytest.importorskip("flash_attn.cute")
        assert select_kernel(GPU).name == "fa4"

    def test_atomic_sums_are_as_accurate(self, device: torch.device) -> None:
        pytest.importorskip("flash_attn.cute")
        kernel = FiniteBetweenTasks(fa4.Fa4Kernel(device))
        tasks = [Task(0, 0, 300), Task(1, 0, 90), Task(0, 300, 700)]
        self.run_and_check(kernel, device, replace(SHAPE, dtype="bfloat16"), [700, 90], tasks)


@pytest.mark.gpu
@needs_gpu
class TestFa2Kernel(GpuConformance):
    head_dims = ((64, 64), (96, 96), (128, 128), (256, 256))

    def runs(self, rule: ScoreRule) -> bool:
        return not rule.softcap

    @pytest.fixture
    def kernel(self) -> Iterator[Kernel]:
        torch.use_deterministic_algorithms(True)
        yield fa2.Fa2Kernel(GPU, deterministic=True)
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@needs_gpu
def test_fa2_asks_for_the_setting_it_needs() -> None:
    with refused():
        fa2.Fa2Kernel(GPU, deterministic=True)


@pytest.mark.gpu
@needs_gpu
def test_cutting_a_document_changes_nothing_but_roundings() -> None:
    """Against the plain library call on whole documents."""
    interface = pytest.importorskip("flash_attn.cute.interface")
    lengths = [4096, 700, 9000]
    cuts = [(0, 0, 1000), (0, 1000, 4096), (1, 0, 700), (2, 0, 4097), (2, 4097, 8000)]
    tasks = [Task(*cut) for cut in [*cuts, (2, 8000, 9000)]]
    bounds = np.append(exclusive_cumsum(np.array(lengths)), sum(lengths))
    generator = torch.Generator(GPU).manual_seed(0)

    def normal(heads: int) -> torch.Tensor:
        rows = torch.randn(sum(lengths), heads, 128, device=GPU, generator=generator)
        return rows.bfloat16()

    q, k, v, do = normal(32), normal(8), normal(8), normal(32)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=GPU)
    scale = 128**-0.5
    call: dict[str, Any] = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "causal": True}
    o, lse, *_ = interface._flash_attn_fwd(q, k, v, softmax_scale=scale, return_lse=True, **call)
    dq, dk, dv = interface._flash_attn_bwd(q, k, v, o, do, lse, softmax_scale=scale, **call)

    begin = bounds[[task.document for task in tasks]]
    batch = TaskBatch(
        q_begin=begin + [task.q_begin for task in tasks],
        q_end=begin + [task.q_end for task in tasks],
        k_begin=begin,
        k_end=begin + [task.q_end for task in tasks],
        dk_begin=begin,
    )
    kernel = fa4.Fa4Kernel(GPU)
    forward = ForwardPart(q, k, v, torch.empty_like(o), torch.empty_like(lse.t()), batch)
    forward = replace(forward, lse=forward.lse.contiguous())
    kernel.forward([forward], scale)
    assert torch.equal(forward.o, o)
    assert torch.equal(forward.lse, lse.t())
    backward = BackwardPart(
        q=q,
        k=k,
        v=v,
        do=do,
        lse=forward.lse,
        delta=(o.float() * do.float()).sum(-1),
        dq=torch.empty_like(q),
        dk=torch.zeros_like(k, dtype=torch.float32),
        dv=torch.zeros_like(v, dtype=torch.float32),
        tasks=batch,
    )
    kernel.backward([backward], scale)
    # dQ differs by the order of float32 sums that are then rounded: few of its elements differ,
    # by a unit in the last place. dK and dV are sums of parts rounded to bfloat16 (2**-9).
    for got, want, bound in (
        (backward.dq, dq, 1e-4),
        (backward.dk, dk, 5e-3),
        (backward.dv, dv, 5e-3),
    ):
        assert float((got.double() - want.double()).norm() / want.double().norm()) <= bound


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_surrogate_output_gives_delta_to_float32_rounding(dtype: torch.dtype) -> None:
    from core_attention.kernels.gpu_gradients import surrogate_output

    do = torch.randn(1000, 4, 96, device=GPU).to(dtype)
    do[::7, 1] = 0
    delta = torch.randn(1000, 4, device=GPU)
    delta[::7, 1] = 0
    got = (do.double() * surrogate_output(do, delta).double()).sum(-1)
    # Three terms leave 2**-27 in bfloat16; float16 ends at its smallest number, 2**-24.
    torch.testing.assert_close(got, delta.double(), rtol=2.0**-22, atol=2.0**-22)
