"""Steps that do not run as planned: given up, left out, run twice; and what is left behind."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from core_attention.kernels.cpu import CpuKernel
from core_attention.kernels.protocol import BackwardPart
from core_attention.manifest import RankManifest, Segment
from core_attention.score_rule import PLAIN, ScoreRule
from tests.support.cluster import NODE_SHAPE, Cluster
from tests.support.loops import PingPong
from tests.support.team import Team
from tests.support.waiting import eventually
from trainer_client import (
    CoreAttentionFailed,
    PlanNotReady,
    Session,
    SessionError,
    checkpoint,
    core_attention,
    in_nano_batch,
)
from trainer_client.errors import ChangedInPlace
from trainer_client.hooks.checkpointing import Checkpoints
from trainer_client.step.ping_pong import Call, run_in_turns

ROWS = 30
SOON_SECONDS = 5.0
"""Far below the deadline of a tick, which is 20 s."""


def random_rows(n_rows: int = ROWS) -> tuple[torch.Tensor, ...]:
    heads = (NODE_SHAPE.num_heads, NODE_SHAPE.num_heads_kv, NODE_SHAPE.num_heads_kv)
    return tuple(torch.randn(n_rows, n, NODE_SHAPE.head_dim, requires_grad=True) for n in heads)


def submit(session: Session, step: int, *, forward_only: bool = False) -> None:
    manifest = RankManifest.from_lengths(
        step, session.options.rank, [[ROWS]] * session.options.n_nano_batches
    )
    session.submit(manifest, forward_only=forward_only)


def run(session: Session, step: int) -> None:
    with session.step(step):
        core_attention(*random_rows()).sum().backward()


def one_lane(cluster: Cluster, placement: str, n_ranks: int = 1, **options: Any) -> Team:
    return Team(cluster, n_ranks, NODE_SHAPE, placement=placement, n_nano_batches=1, **options)


def wait_for_no_buffers(sessions: Sequence[Session]) -> None:
    """Transfers return theirs when their connection is closed, a moment later."""
    eventually(
        lambda: not any(session._pool.stats().in_use_bytes for session in sessions), SOON_SECONDS
    )


class _Buffered(nn.Module):
    """Keeps keys in memory that all of its passes write to."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.keys = torch.empty(ROWS, NODE_SHAPE.num_heads_kv, NODE_SHAPE.head_dim)
        self._copies = copies

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.keys.copy_(k.detach())
        return core_attention(q, self.keys.clone() if self._copies else self.keys, v).sum()


@pytest.mark.parametrize("copies", [False, True])
def test_a_buffer_of_all_nano_batches_is_refused(pool_of_four: Cluster, copies: bool) -> None:
    """A gradient would be that of the keys which another nano-batch has written."""
    refused = pytest.raises(ChangedInPlace)
    with Team(pool_of_four, 1, NODE_SHAPE, placement="in-place") as team:
        session = team.sessions[0]
        submit(session, 0)
        batches = [dict(zip("qkv", random_rows(), strict=True)) for _ in range(2)]
        with nullcontext() if copies else refused, session.step(0):
            sum(PingPong(_Buffered(copies=copies))(batches)).backward()


def test_nano_batches_of_inference_mode_may_share_a_buffer(pool_of_four: Cluster) -> None:
    """Its tensors count no writes, so servers read copies."""
    with Team(pool_of_four, 1, NODE_SHAPE, placement="in-place") as team:
        session = team.sessions[0]
        batches = [dict(zip("qkv", random_rows(), strict=True)) for _ in range(2)]
        outputs = []
        for step, copies in enumerate((False, True)):
            submit(session, step, forward_only=True)
            with session.step(step), torch.inference_mode():
                outputs.append(PingPong(_Buffered(copies=copies))(batches))
        # Steps have plans of their own, by which sums are rounded in other orders.
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_a_gradient_that_is_changed_while_servers_need_it_is_named(pool_of_four: Cluster) -> None:
    """By a hook in the other nano-batch's backward pass."""
    seen: list[torch.Tensor] = []

    def change_the_others(do: torch.Tensor) -> None:
        for other in seen:
            other.mul_(2.0)
        seen.append(do)

    class Hooked(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            o = core_attention(q, k, v)
            o.register_hook(change_the_others)
            return o.square().sum()

    with Team(pool_of_four, 1, NODE_SHAPE, placement="in-place") as team:
        session = team.sessions[0]
        submit(session, 0)
        batches = [dict(zip("qkv", random_rows(), strict=True)) for _ in range(2)]
        with pytest.raises(ChangedInPlace) as raised, session.step(0):
            sum(PingPong(Hooked())(batches)).backward()
        assert raised.value.names == ("do",)


@pytest.mark.parametrize("kind", ["served", "window", "sinks"])
def test_gradients_of_gradients_are_refused(pool_of_four: Cluster, kind: str) -> None:
    """Of a loss that is linear in the output too, whose gradient there has none."""
    options: dict[str, dict[str, Any]] = {
        "served": {},
        "window": {"window": 8},
        "sinks": {"sinks": torch.zeros(NODE_SHAPE.num_heads)},
    }
    with one_lane(pool_of_four, "in-place") as team:
        session = team.sessions[0]
        submit(session, 0)
        rows, others = random_rows(), random_rows()
        with session.step(0):
            loss = core_attention(*rows, **options[kind]).sum()
            if kind == "window":  # is served nothing
                loss = loss + core_attention(*others).sum()
            gradient, *_ = torch.autograd.grad(
                loss, [rows[0], others[0]], create_graph=True, allow_unused=True
            )
            with pytest.raises(SessionError):
                gradient.pow(2).sum().backward()


@pytest.mark.parametrize("placement", ["pool", "in-place"])
def test_a_backward_that_cannot_be_is_refused_at_once(
    pool_of_four: Cluster, placement: str
) -> None:
    """A second one, and one of a step that has none."""
    with one_lane(pool_of_four, placement) as team:
        session = team.sessions[0]
        submit(session, 0)
        with session.step(0):
            loss = core_attention(*random_rows()).sum()
            loss.backward(retain_graph=True)
            with pytest.raises(CoreAttentionFailed):
                loss.backward()
        submit(session, 1, forward_only=True)
        with pytest.raises(CoreAttentionFailed), session.step(1):
            core_attention(*random_rows()).sum().backward()


@pytest.mark.parametrize("placement", ["pool", "in-place", "mixed"])
def test_layers_train_after_a_step_in_inference_mode(pool_of_four: Cluster, placement: str) -> None:
    # The kernel at home belongs to the process, and so does what it keeps; wider than any before.
    heads, n_heads_kv, head_dim = 6, 3, 40
    with one_lane(pool_of_four, placement) as team:
        session, rows = team.sessions[0], random_rows()
        wide = [
            torch.randn(ROWS, n, head_dim, requires_grad=True) for n in (heads, *[n_heads_kv] * 2)
        ]
        submit(session, 0, forward_only=True)
        submit(session, 1)
        with torch.inference_mode(), session.step(0):
            of_step = core_attention(*(each.detach() for each in rows))
            found = core_attention(*(each.detach() for each in wide), window=5, softcap=3.0)
        with session.step(1):
            served = core_attention(*rows)
            at_home = core_attention(*wide, window=5, softcap=3.0)
            (served.sum() + at_home.sum()).backward()
        assert torch.equal(found, at_home.detach())
        # Documents may be cut elsewhere in the other step's plan, and float32 sums differ by that.
        torch.testing.assert_close(of_step, served.detach(), rtol=1e-5, atol=1e-6)


def test_a_step_inside_another_is_refused_at_once(pool_of_four: Cluster) -> None:
    with one_lane(pool_of_four, "in-place") as team:
        session = team.sessions[0]
        submit(session, 0)
        submit(session, 1, forward_only=True)
        with session.step(0):
            o = core_attention(*random_rows())
            with (
                pytest.raises(SessionError),
                session.step(1),
            ):
                pass
            o.sum().backward()
        with session.step(1):
            core_attention(*random_rows())


class FailingLane(nn.Module):
    """Calls core attention twice; raises between, if told to."""

    def forward(self, fail: bool) -> torch.Tensor:
        first = core_attention(*random_rows())
        if fail:
            raise KeyError("this lane")
        return first + core_attention(*random_rows())


class FailsInCheckpoint(nn.Module):
    """Lanes give way inside a checkpoint; one raises there, if told to."""

    def forward(self, fail: bool) -> torch.Tensor:
        def part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            o = core_attention(q, k, v) * 1.0
            if fail:
                raise torch.OutOfMemoryError("this lane")
            return o

        o: torch.Tensor = checkpoint(part, *random_rows())
        return o


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_a_checkpoint_is_told_and_the_next_step_runs(
    pool_of_four: Cluster, failing: int
) -> None:
    with Team(pool_of_four, 1, NODE_SHAPE, placement="pool") as team:
        session, model = team.sessions[0], PingPong(FailsInCheckpoint())
        for step, fail in enumerate((True, False, True, False)):
            submit(session, step)
            batches = [{"fail": fail and lane == failing} for lane in range(2)]
            if fail:
                with pytest.raises(torch.OutOfMemoryError), session.step(step):
                    model(batches)
            else:
                with session.step(step):
                    torch.stack([o.sum() for o in model(batches)]).sum().backward()


def test_a_step_ends_beside_a_graph_that_was_made_at_home(pool_of_four: Cluster) -> None:
    """Its checkpoints are no lane's, and are recomputed after it."""

    def at_home(rows: torch.Tensor) -> torch.Tensor:
        Checkpoints().keep(object(), rows.detach(), rows.detach())
        return rows * 2.0

    with one_lane(pool_of_four, "pool") as team:
        session, (q, _, _) = team.sessions[0], random_rows()
        kept = checkpoint(at_home, q)
        submit(session, 0)
        run(session, 0)
        kept.sum().backward()
        torch.testing.assert_close(q.grad, torch.full_like(q, 2.0), rtol=0, atol=0)


def test_a_checkpoint_around_lanes_that_take_turns_is_refused(pool_of_four: Cluster) -> None:
    with Team(pool_of_four, 1, NODE_SHAPE, placement="pool") as team:
        session, model = team.sessions[0], PingPong(FailsInCheckpoint())
        submit(session, 0)
        with (
            pytest.raises(SessionError),
            session.step(0),
        ):
            checkpoint(model, [{"fail": False}] * 2)


@pytest.mark.parametrize("placement", ["pool", "mixed"])
def test_steps_given_up_in_one_lane_leave_no_buffers(pool_of_four: Cluster, placement: str) -> None:
    with Team(pool_of_four, 1, NODE_SHAPE, placement=placement, n_layers=2) as team:
        session = team.sessions[0]
        for step in range(5):
            submit(session, step)
            if step % 2:
                with pytest.raises(KeyError), session.step(step):
                    PingPong(FailingLane())([{"fail": True}, {"fail": False}])
            else:
                with session.step(step):
                    outputs = PingPong(FailingLane())([{"fail": False}, {"fail": False}])
                    torch.autograd.backward([o.sum() for o in outputs])
        assert session._pool.stats().idle_bytes
        team.close()
        wait_for_no_buffers([session])
        assert session._pool.stats().idle_bytes == 0, "a closed session keeps its buffers"


@pytest.mark.parametrize("placement", ["pool", "in-place"])
def test_submitted_steps_may_be_left_out(pool_of_four: Cluster, placement: str) -> None:
    with one_lane(pool_of_four, placement) as team:
        session = team.sessions[0]
        for step in range(6):
            submit(session, step)
        for step in (0, 3, 5):
            began = time.monotonic()
            run(session, step)
            assert time.monotonic() - began < SOON_SECONDS
        eventually(lambda: not session._steps.manifests(), SOON_SECONDS)


def test_steps_run_in_increasing_order(pool_of_four: Cluster) -> None:
    with one_lane(pool_of_four, "pool") as team:
        session = team.sessions[0]
        for step in (4, 5):
            submit(session, step)
        run(session, 5)
        with pytest.raises(SessionError):
            run(session, 4)
        with pytest.raises(ValueError):
            submit(session, 5)


def test_a_step_whose_plan_was_late_may_be_run_again(pool_of_four: Cluster) -> None:
    with one_lane(pool_of_four, "pool", n_ranks=2, plan_timeout_seconds=0.5) as team:
        first, second = team.sessions
        submit(first, 0)
        with pytest.raises(PlanNotReady), first.step(0):
            pass
        submit(second, 0)
        run(first, 0)


def test_a_rank_that_is_done_serves_the_others_to_the_end(pool_of_four: Cluster) -> None:
    lengths = [30, 20, 10] * 4

    def forward_and_leave(session: Session, late_seconds: float) -> None:
        with session.step(0), torch.no_grad():
            core_attention(*random_rows(sum(lengths)))
            time.sleep(late_seconds)
            core_attention(*random_rows(sum(lengths)))
        session.close()

    with one_lane(pool_of_four, "in-place", n_ranks=2, n_layers=2) as team:
        for session in team.sessions:
            manifest = RankManifest.from_lengths(0, session.options.rank, [lengths])
            session.submit(manifest, forward_only=True)
        futures = [
            thread.submit(forward_and_leave, session, 0.5 * session.options.rank)
            for thread, session in zip(team._threads, team.sessions, strict=True)
        ]
        for future in futures:
            future.result(30)


class FailingKernel(CpuKernel):
    def backward(
        self, parts: Sequence[BackwardPart], scale: float, rule: ScoreRule = PLAIN
    ) -> None:
        raise MemoryError("no memory for the scores")


def test_a_kernel_that_fails_is_named_on_every_rank(pool_of_four: Cluster) -> None:
    def run_both(session: Session) -> str:
        try:
            run(session, 0)
        except SessionError as error:
            return str(error)
        return "no error"

    with one_lane(pool_of_four, "in-place", n_ranks=2) as team:
        for session in team.sessions:
            assert session._in_place is not None
            session._in_place._executor.kernel = FailingKernel()
            rank = session.options.rank
            session.submit(RankManifest(0, rank, ((Segment(1, 2 * ROWS, rank * ROWS, ROWS),),)))
        futures = [
            thread.submit(run_both, session)
            for thread, session in zip(team._threads, team.sessions, strict=True)
        ]
        for future in futures:
            assert "no memory for the scores" in future.result(30)
        wait_for_no_buffers(team.sessions)


def test_memory_of_messages_is_there_before_the_step(pool_of_four: Cluster) -> None:
    """The plan tells how much, and however many layers run, nothing is allocated any more: but for
    a request that has arrived and is not known yet to have left, one in each lane."""
    with Team(pool_of_four, 2, NODE_SHAPE, placement="pool", n_layers=6) as team:
        submitted = team.submit(
            [RankManifest.from_lengths(0, rank, [[300, 40], [17, 200]]) for rank in range(2)]
        )
        eventually(lambda: all(0 in session._steps._routes for session in team.sessions))
        pools = [session._pool for session in team.sessions]
        before = [pool.stats().allocations for pool in pools]
        for future in team.start_submitted(submitted):
            future.result(SOON_SECONDS)
        more = [pool.stats().allocations - made for pool, made in zip(pools, before, strict=True)]
        assert all(made > 0 for made in before)
        assert all(made <= team.n_nano_batches for made in more), (before, more)


@pytest.mark.parametrize("placement", ["pool", "in-place"])
def test_a_steps_tensors_go_with_their_last_reference(
    pool_of_four: Cluster, placement: str
) -> None:
    """Not when Python collects garbage: on a GPU that may be many steps later."""
    with Team(pool_of_four, 1, NODE_SHAPE, placement=placement, n_layers=2) as team:
        manifest = RankManifest.from_lengths(0, 0, [[300, 40], [17, 200]])
        team.run([manifest])
        gc.collect()
        gc.disable()
        try:
            result = team.run([manifest])
            storages = {
                tensor.data_ptr() for rows in result.rows.values() for tensor in rows.values()
            }
            del result
            found = [
                tensor.shape
                for tensor in gc.get_objects()
                # Not those without storage, which torch.compile of an earlier test leaves behind.
                if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.data_ptr() in storages
            ]
            assert not found
        finally:
            gc.enable()


def test_outputs_of_lanes_go_with_their_last_reference(pool_of_four: Cluster) -> None:
    """A pipeline joins those of a microbatch and keeps the whole until its backward pass."""

    def layer(*rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(core_attention, *rows)
        return 2.0 * out

    with Team(pool_of_four, 1, NODE_SHAPE, placement="in-place", n_nano_batches=2) as team:
        (session,) = team.sessions
        submit(session, 0)
        rows = [random_rows() for _ in range(2)]
        calls: list[Call] = [(tuple(each), {}) for each in rows]
        with session.step(0):
            outputs = run_in_turns(layer, calls, 0)
            halves = [weakref.ref(output) for output in outputs]
            joined = torch.cat(outputs)
            del outputs
            assert [half() for half in halves] == [None, None]
            joined.sum().backward()
        assert all(q.grad is not None for q, *_ in rows)


causal: Any = partial(nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)


def test_a_loop_of_one_s_own_runs_microbatches_in_any_order(pool_of_four: Cluster) -> None:
    """Gradient accumulation within a step: forward and backward of one after the other."""
    with Team(pool_of_four, 1, NODE_SHAPE, placement="mixed", n_nano_batches=3) as team:
        (session,) = team.sessions
        submit(session, 0)
        with session.step(0):
            for index in (2, 0, 1):
                served = random_rows()
                alone = tuple(rows.detach().clone().requires_grad_() for rows in served)
                with in_nano_batch(index):
                    o = core_attention(*served)
                plain = causal(*(rows.transpose(0, 1) for rows in alone)).transpose(0, 1)
                do = torch.randn_like(o)
                o.backward(do)
                plain.backward(do)
                # Sums of up to thirty products of size 1 in float32.
                torch.testing.assert_close(o, plain, rtol=1e-5, atol=1e-5)
                for ours, theirs in zip(served, alone, strict=True):
                    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
        submit(session, 1)
        with (
            pytest.raises(SessionError),
            session.step(1),
            in_nano_batch(3),
        ):
            pass
        submit(session, 2)
        with pytest.raises(SessionError):
            run(session, 2)
