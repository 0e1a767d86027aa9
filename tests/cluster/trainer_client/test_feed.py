"""``submit_ahead``: a loader's steps are submitted before they run."""

from __future__ import annotations

import dataclasses
import itertools
from collections import UserDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import accelerate
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from core_attention.errors import ManifestError
from core_attention.manifest import RankManifest
from tests.support.cluster import NODE_SHAPE, Cluster, on_this_host
from trainer_client import PingPong, Session, SessionOptions, core_attention, submit_ahead


class Recording:
    """A session that notes what is submitted."""

    options = SimpleNamespace(rank=0)

    def __init__(self) -> None:
        self.submitted: list[RankManifest] = []

    @property
    def next_step(self) -> int:
        return len(self.submitted)

    def submit(self, manifest: RankManifest, *, forward_only: bool) -> None:
        self.submitted.append(manifest)

    def is_past(self, step: int) -> bool:
        return False


class RecordingRows(Recording):
    """The same, for whole rows."""

    options = SimpleNamespace(rank=0, n_nano_batches=2, cut_documents=False)


def steps(n: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    for step in range(n):
        yield [{"position_ids": torch.arange(step + 1)[None]}, {"position_ids": torch.arange(3)}]


@pytest.mark.parametrize("ahead", [0, 2, 9])
def test_steps_are_submitted_ahead_and_come_in_order(ahead: int) -> None:
    session: Any = Recording()
    seen = []
    for step, nano_batches in submit_ahead(session, steps(5), ahead=ahead):
        assert len(session.submitted) == min(step + 1 + ahead, 5)
        assert nano_batches[0]["position_ids"].numel() == step + 1
        seen.append(step)
    assert seen == list(range(5))
    assert session.submitted == [
        RankManifest.from_lengths(step, 0, ([step + 1], [3])) for step in range(5)
    ]


def rows_of_accelerate(n: int) -> Any:
    rows: Any = [{"position_ids": torch.arange(length)[None]} for length in range(2, n + 2)]
    return accelerate.Accelerator(cpu=True).prepare_data_loader(DataLoader(rows, batch_size=None))


@pytest.mark.parametrize("ahead", [0, 2, 9])
@pytest.mark.parametrize("n", [1, 5])
def test_the_last_batch_of_accelerate_is_so_when_it_is_trained_on(ahead: int, n: int) -> None:
    """By that, its accumulation of gradients ends with the loader."""
    session: Any = RecordingRows()
    loader, state = rows_of_accelerate(n), accelerate.state.GradientState()

    def epochs() -> Iterator[Any]:
        for _ in range(2):
            yield from loader

    for source, n_epochs in ((loader, 1), (epochs(), 2)):
        said = [state.end_of_dataloader for _ in submit_ahead(session, source, ahead=ahead)]
        assert said == n_epochs * [*(n - 1) * [False], True]
        assert not state.in_dataloader


@pytest.mark.parametrize("n", [1, 2])
def test_a_loader_that_was_left_at_its_last_batch_begins_anew(n: int) -> None:
    """As epochs of transformers' Trainer are."""
    session: Any = RecordingRows()
    loader, state = rows_of_accelerate(n), accelerate.state.GradientState()
    for _ in range(3):
        steps_of_epoch = submit_ahead(session, loader, ahead=1)
        said = [state.end_of_dataloader for _ in itertools.islice(steps_of_epoch, n)]
        assert said == [*(n - 1) * [False], True]


def test_a_look_at_the_loader_beside_its_last_batch_ends_no_later_epoch() -> None:
    session: Any = RecordingRows()
    loader = rows_of_accelerate(2)
    epochs = itertools.chain.from_iterable(loader for _ in range(3))
    n_steps = 0
    for _ in submit_ahead(session, epochs, ahead=1):
        n_steps += 1
        next(iter(loader))
    assert n_steps == 6


def test_a_loop_inside_one_over_a_loader_of_accelerate_is_a_loop_of_its_own() -> None:
    session: Any = RecordingRows()
    state = accelerate.state.GradientState()
    for index, batch in enumerate(rows_of_accelerate(2)):
        inner = submit_ahead(session, [batch, batch, batch], ahead=1)
        assert [state.end_of_dataloader for _ in inner] == 3 * [index == 1]


@pytest.mark.parametrize(
    "row",
    [
        {"position_ids": torch.empty(1, 0, dtype=torch.int64)},
        {"cu_seq_lens_q": torch.tensor([0])},
        {"input_ids": torch.empty(0, 4), "attention_mask": torch.empty(0, 4)},
    ],
)
def test_a_whole_row_without_documents_is_refused(row: dict[str, torch.Tensor]) -> None:
    session: Any = RecordingRows()
    with pytest.raises(ManifestError):
        list(submit_ahead(session, [row]))


def test_documents_may_be_told_by_cumulative_lengths() -> None:
    session: Any = Recording()
    batch = {"cu_seq_lens_q": torch.tensor([0, 3, 7])}
    list(submit_ahead(session, [[batch, batch]]))
    assert session.submitted == [RankManifest.from_lengths(0, 0, ([3, 4], [3, 4]))]


def padded(lengths: list[int], side: str = "right") -> dict[str, torch.Tensor]:
    longest = max(lengths)
    before = torch.arange(longest) < torch.tensor(lengths)[:, None]
    mask = before if side == "right" else before.flip(1)
    return {"input_ids": torch.zeros(mask.shape), "attention_mask": mask.long()}


def test_rows_of_a_padded_batch_are_documents() -> None:
    session: Any = Recording()
    session.options = SimpleNamespace(rank=0, n_nano_batches=2, cut_documents=False)
    for side in ("right", "left"):
        session.submitted.clear()
        list(submit_ahead(session, [padded([7, 1, 5, 2], side)]))
        (manifest,) = session.submitted
        assert manifest == RankManifest.from_lengths(manifest.step, 0, ([7], [1, 5, 2]))
    hole = padded([4, 4])
    hole["attention_mask"][1, 2] = 0
    for batch in (hole, padded([4, 0])):
        with pytest.raises(ManifestError):
            list(submit_ahead(session, [batch]))


def test_batches_without_documents_are_refused_by_name() -> None:
    session: Any = Recording()
    with pytest.raises(ManifestError):
        list(submit_ahead(session, [[{"input_ids": torch.zeros(1, 3)}]]))
    session.options = SimpleNamespace(rank=0, n_nano_batches=2, cut_documents=False)
    # TRL refuses padding_free=True beside its own max_length.
    with pytest.raises(ManifestError):
        list(submit_ahead(session, [{"input_ids": torch.zeros(1, 3)}]))
    with pytest.raises(ValueError, match="ahead is -1"):
        list(submit_ahead(session, steps(1), ahead=-1))
    text: Any = "3"
    with pytest.raises(ValueError, match="ahead is '3'; it must be an integer, 0 or more"):
        list(submit_ahead(session, steps(1), ahead=text))


@dataclasses.dataclass(frozen=True)
class Packed:
    """As Megatron's parameters of packed sequences."""

    cu_seqlens: torch.Tensor


class Pair(NamedTuple):
    tokens: torch.Tensor
    labels: torch.Tensor


class Encoding(UserDict[str, Any]):
    """As of transformers' tokenizers."""


@pytest.mark.parametrize(
    "wrap",
    [
        lambda rows: rows,
        lambda rows: rows.numpy(),
        lambda rows: rows[None].expand(2, -1),
        lambda rows: [(rows, "text")],
        lambda rows: Pair(rows, rows),
        lambda rows: Packed(rows),
        lambda rows: Encoding({"rows": {"rows": rows}}),
    ],
    ids=["tensor", "array", "view", "list", "named tuple", "dataclass", "user dict"],
)
@pytest.mark.parametrize("ahead", [0, 3])
def test_a_loader_may_reuse_its_memory(wrap: Callable[[torch.Tensor], Any], ahead: int) -> None:
    """As nanochat's, which fills one pinned buffer again and again."""
    session: Any = RecordingRows()
    buffer = torch.empty(4, dtype=torch.int64)
    row = {"position_ids": torch.arange(4)[None], "input": wrap(buffer)}

    def loader() -> Iterator[Any]:
        for step in range(6):
            buffer.fill_(step)
            yield row

    seen = []
    for _, batch in submit_ahead(session, loader(), ahead=ahead):
        assert type(batch["input"]) is type(row["input"])
        seen.append(str(batch["input"]))
    assert seen == [str(row["input"]) for _ in loader()]


class Attention(nn.Module):
    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        rows = position_ids.numel()
        q, k, v = (torch.ones(rows, heads, 16, requires_grad=True) for heads in (4, 2, 2))
        return core_attention(q, k, v)


def options_of(cluster: Cluster, job: str) -> SessionOptions:
    """Of one rank and one layer."""
    return SessionOptions(
        control_plane=cluster.address,
        job=job,
        rank=0,
        n_ranks=1,
        n_layers=1,
        shape=NODE_SHAPE,
        **on_this_host(cluster.folder),
    )


def test_a_session_runs_one_loader_after_another(pool_of_four: Cluster) -> None:
    """Numbers go on, also where a loop was left early; evaluation has no backward pass."""
    model = PingPong(Attention())
    ran = []
    with Session.open(options_of(pool_of_four, "feed")) as session:
        for step, nano_batches in submit_ahead(session, steps(4), ahead=1):
            with session.step(step):
                sum(o.sum() for o in model(nano_batches)).backward()
            ran.append(step)
            if step == 1:
                break
        for step, nano_batches in submit_ahead(session, steps(2), forward_only=True):
            with session.step(step) as running, torch.no_grad():
                model(nano_batches)
            assert running.complete
            ran.append(step)
    assert ran == [0, 1, 3, 4]


def test_a_loader_runs_amid_another(pool_of_four: Cluster) -> None:
    """Evaluation between two training steps: those submitted ahead of it are submitted anew."""
    model = PingPong(Attention())
    trained, evaluated = [], []
    with Session.open(options_of(pool_of_four, "feed-amid")) as session:
        for step, nano_batches in submit_ahead(session, steps(6), ahead=2):
            with session.step(step):
                sum(o.sum() for o in model(nano_batches)).backward()
            trained.append((step, nano_batches[0]["position_ids"].numel()))
            if len(trained) in (2, 3, 5):
                for number, batch in submit_ahead(session, steps(2), ahead=1, forward_only=True):
                    with session.step(number) as running, torch.no_grad():
                        model(batch)
                    assert running.complete
                    evaluated.append(number)
    numbers, rows = zip(*trained, strict=True)
    assert rows == (1, 2, 3, 4, 5, 6)
    assert len(evaluated) == 6
    ran = sorted([*numbers, *evaluated])
    assert len(set(ran)) == 12
    assert list(numbers) == sorted(numbers)
    # Each evaluation lies between the training steps that it was run between.
    for index, before in ((0, 1), (2, 2), (4, 4)):
        assert numbers[before] < evaluated[index] < evaluated[index + 1] < numbers[before + 1]
