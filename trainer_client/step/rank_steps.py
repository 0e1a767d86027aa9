"""A rank's steps: carries out what :class:`trainer_client.machine.rank.RankMachine` decides.

Three threads come here: the training loop submits, begins and ends steps, sends ticks and waits for
them; the link's thread reports plans, recoveries and finished steps, in the control plane's order;
and a thread of this module connects to the servers of new plans and replays, which may take a
while. One lock guards the machine, and nothing is carried out while it is held.

See ``docs/fault_tolerance.md``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NoReturn, ParamSpec, TypeAlias

import torch

from attention_node.cuda_order import record_event
from attention_node.served_job import JobDescription
from attention_node.tick_server import TickServer
from core_attention.ca_task import Phase
from core_attention.manifest import RankManifest
from core_attention.plan import AT_HOME
from core_attention.step_lane import place_of
from core_attention.tick import Tick, ticks_of_lane
from data_plane.buffer_pool import BufferPool
from data_plane.liveness import LivenessMonitor
from distca.contract.codec import rank_manifest_to_proto
from distca.contract.server_loss import LossCause, ServerLoss
from distca.contract.timeouts import default_seconds
from distca.v1 import jobs_pb2
from trainer_client.errors import CoreAttentionFailed, PlanNotReady, SessionError
from trainer_client.hooks.input_versions import Unwritten
from trainer_client.link.control_link import ControlLink
from trainer_client.link.planned_step import HandedInStep, PlannedStep, numbered
from trainer_client.machine.instructions import (
    AbandonOwnServer,
    CloseConnections,
    Connect,
    CountRecovery,
    DeriveAhead,
    EndLane,
    ForgetInputs,
    ForgetQueries,
    Instruction,
    LetGo,
    PlanOwnServer,
    Progress,
    RecoverOwnServer,
    ReportGivenUp,
    ReportLost,
    ReportProgress,
    ReportReplay,
    SendTick,
    TakeIn,
)
from trainer_client.machine.outlines import PlanOutline
from trainer_client.machine.rank import RankMachine
from trainer_client.metrics import TickWait, TrainerMetrics
from trainer_client.options import SessionOptions
from trainer_client.step.examiner import Examiner
from trainer_client.step.exchanges import Routes
from trainer_client.step.home import compute_documents
from trainer_client.step.home_tasks import whole_documents
from trainer_client.step.replies import Awaited, ExchangeFailed, Exchanger, Tensors
from trainer_client.step.running_step import RunningStep
from trainer_client.step.sent_tick import SentTick
from trainer_client.step.servers import NotWanted, ServerLinks, Unreachable
from trainer_client.step.step_report import DeviceWait

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.25
"""How often a wait looks whether something else has ended or begun."""

HOME_SECONDS = default_seconds("home_seconds")
"""The control plane may be away for so long before this rank computes what it waits for itself."""

DOUBT_SECONDS = 1.0
"""After so long a wait it is found out whether the control plane answers."""

WAITING_SECONDS = 3.0
"""After so long a wait it is reported to the control plane, which may find that ranks wait for each
other."""

_MAX_REASON_LETTERS = 2000

_P = ParamSpec("_P")
_Instructions: TypeAlias = Sequence[Instruction[PlannedStep, LossCause]]
_Outline: TypeAlias = PlanOutline[PlannedStep]


class RankSteps:
    """The steps of one rank, from handing in a manifest until every rank has finished the step.

    Args:
        options: of the session.
        link: to the control plane.
        servers: connections to servers.
        in_place: this process's own server.
        pool: what messages are taken from.
        examiner: looks at other processes' replies.
        liveness: finds servers that are stopped or cut off while they owe something.
        metrics: receives what happens.

    Attributes:
        lock: guards the machine, and the lanes of running steps.
    """

    def __init__(
        self,
        options: SessionOptions,
        link: ControlLink,
        servers: ServerLinks,
        in_place: TickServer,
        pool: BufferPool,
        examiner: Examiner,
        liveness: LivenessMonitor,
        metrics: TrainerMetrics,
    ) -> None:
        self._options = options
        self._link = link
        self._servers = servers
        self._in_place = in_place
        self._pool = pool
        self._examiner = examiner
        self._liveness = liveness
        self._metrics = metrics
        self._device = torch.device(options.device)
        self._machine: RankMachine[HandedInStep, PlannedStep, LossCause] = RankMachine(
            options.n_layers,
            options.n_nano_batches,
            recovery_timeout_seconds=options.recovery_timeout_seconds,
            own_layers=options.own_layers,
            head_groups=options.head_groups,
            kept_forward_ticks=options.kept_forward_ticks,
        )
        self.lock = threading.Condition()
        self._job: JobDescription | None = None
        self._exchanger: Exchanger | None = None
        self._n_joined = 0
        self._is_at_home = self._was_unplanned = False
        self._running: dict[int, RunningStep] = {}
        self._routes: dict[int, Routes] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="distca-recovery")

    # The training loop.

    def submit(self, manifest: RankManifest, *, forward_only: bool) -> None:
        """Hands in a coming step's manifest; a refusal is raised by :meth:`begin`."""
        self._link.check()
        handed_in = HandedInStep(
            manifest=rank_manifest_to_proto(manifest), forward_only=forward_only
        )
        with self.lock:
            self._machine.hand_in(manifest.step, handed_in)
        self._link.submit(handed_in)

    def join(self, manifest: RankManifest, joining: jobs_pb2.Joining, *, forward_only: bool) -> int:
        """Hands in a coming step that has no number; returns which hand-in it is. One before it
        that has no number either is void."""
        self._link.check()
        handed_in = HandedInStep(
            manifest=rank_manifest_to_proto(manifest), forward_only=forward_only, joining=joining
        )
        with self.lock:
            self._n_joined += 1
            handed_in.joining.sequence = sequence = self._n_joined
            handed_in.joining.first_step = self._machine.first_unknown
            self._machine.join(sequence, handed_in)
        self._link.submit(handed_in)
        return sequence

    def tell(self, joining: jobs_pb2.Joining) -> None:
        """Says that the forward of a hand-in has begun, and where the rank's round is."""
        self._link.check()
        with self.lock:
            handed_in = self._machine.joining(joining.sequence)
            if handed_in is not None:
                begun = HandedInStep()
                begun.CopyFrom(handed_in)
                begun.joining.MergeFrom(joining)
                self._machine.begins(joining.sequence, begun)
        self._link.tell(joining)

    def wait_plan(self, step: int, timeout_seconds: float) -> PlannedStep:
        """The plan of ``step``.

        Time in which the control plane is away does not count."""
        self._link.check()
        if not self._machine.is_known(step):
            raise PlanNotReady(f"step {step}: submit its manifest before running it")
        planned = self._wait_for(
            lambda: self._plan_of(step), lambda: self._planned_at_home(step), timeout_seconds
        )
        return planned or self._not_ready(step, timeout_seconds)

    def wait_joined(self, sequence: int, timeout_seconds: float) -> PlannedStep:
        """The plan of a hand-in without a number; as :meth:`wait_plan`."""

        def plan() -> PlannedStep | None:
            step = self._machine.number_of(sequence)
            if step is not None:
                return self._plan_of(step)
            if refusal := self._machine.take_refused_hand_in(sequence):
                raise PlanNotReady(refusal)
            return None

        def go_home() -> PlannedStep | None:
            step = self._machine.number_of(sequence)
            return self._numbered_at_home(sequence) if step is None else self._planned_at_home(step)

        return self._wait_for(plan, go_home, timeout_seconds) or self._not_ready(
            None, timeout_seconds
        )

    def void_before(self, sequence: int) -> list[PlannedStep]:
        """The plans of hand-ins before ``sequence`` that were not begun, in order."""
        with self.lock:
            outlines = map(self._machine.outline_of, self._machine.void_before(sequence))
            return [outline.plan for outline in outlines if outline is not None]

    def _plan_of(self, step: int) -> PlannedStep | None:
        if refusal := self._machine.take_refusal(step):
            raise PlanNotReady(f"step {step}: {refusal}")
        outline = self._machine.outline_of(step)
        return None if outline is None else outline.plan

    def _wait_for(
        self,
        look: Callable[[], PlannedStep | None],
        go_home: Callable[[], PlannedStep | None],
        timeout_seconds: float,
    ) -> PlannedStep | None:
        remaining_seconds, doubt_at = timeout_seconds, time.monotonic() + DOUBT_SECONDS
        with self.lock:
            while remaining_seconds > 0:
                self._link.check()
                if (planned := look()) is not None:
                    return planned
                if self._is_away(doubt_at) and (home := go_home()) is not None:
                    return home
                present, began = self._link.connected, time.monotonic()
                self.lock.wait(min(CHECK_SECONDS, remaining_seconds))
                if present:
                    remaining_seconds -= time.monotonic() - began
        self._link.check()
        return None

    def _not_ready(self, step: int | None, timeout_seconds: float) -> NoReturn:
        which = "the open step" if step is None else f"step {step}"
        raise PlanNotReady(
            f"{which}: no plan in {timeout_seconds:g} s; {self._link.who_is_late(step)}"
        )

    def _is_away(self, doubt_at: float) -> bool:
        """Return whether no plan is to be expected: the control plane has been away for a while. If
        one has waited until ``doubt_at``, that is found out."""
        if time.monotonic() > doubt_at:
            self._link.make_sure()
        return self._link.away_seconds > HOME_SECONDS

    def _planned_at_home(self, step: int) -> PlannedStep | None:
        handed_in = self._machine.manifest_of(step)
        return None if handed_in is None else self._own(handed_in)

    def _numbered_at_home(self, sequence: int) -> PlannedStep | None:
        """As :meth:`_planned_at_home`, for a hand-in without a number: it gets the first one that
        fits it and nobody has used, as far as is known. Should the control plane give it another,
        it is left out under that. A control plane that is back learns where the rank's round is,
        since others' hand-ins may have come there meanwhile."""
        handed_in = self._machine.joining(sequence)
        if handed_in is None:
            return None
        joining, step = handed_in.joining, self._machine.first_unknown
        n_nano_batches = self._options.n_nano_batches
        while place_of(step, n_nano_batches, joining.turns) in joining.open_places:
            step += 1
        handed_in = numbered(handed_in, step)
        if (home := self._own(handed_in)) is not None:
            self._machine.numbered(sequence, step, handed_in)
            self._link.tell(joining)
        return home

    def _own(self, handed_in: HandedInStep) -> PlannedStep | None:
        assert self._job is not None
        return PlannedStep.of_own(handed_in, self._options.n_ranks, self._job.shape.mask)

    def begin(self, planned: PlannedStep) -> RunningStep:
        """Begins a step that has a plan; earlier steps that have not begun are left out. Connects
        to the plan's servers, unless a recovery has made it void."""
        assert self._job is not None
        step = planned.plan.step
        running = RunningStep(
            planned.plan,
            job=self._job,
            rank=self._options.rank,
            device=self._device,
            forward_only=planned.forward_only,
            ticks=self,
        )
        with self.lock:
            self._running[step] = running
            instructions = self._machine.begin_step(
                step,
                running.lane_outlines,
                forward_only=planned.forward_only,
                now=time.monotonic(),
            )
            machine = self._machine.running(step)
            assert machine is not None
            running.machine = machine
            # Unless a plan has come meanwhile, and not of others' step of that number.
            outline = self._machine.outline_of(step)
            has_plan = outline is not None and outline.plan.sequence == planned.sequence
            goes_home = planned.at_home and not has_plan
            if goes_home:
                instructions += self._machine.go_home(step, time.monotonic())
        self._carry_out(instructions, connects=True)
        if goes_home:
            self._count_at_home(running)
        elif planned.plan.planner == AT_HOME and not self._was_unplanned:
            self._was_unplanned = True
            logger.warning(
                "job %s: documents stay at home in step %d, and perhaps in later ones: %s",
                self._link.job_id,
                step,
                planned.plan.reason,
            )
        return running

    def stop(self, running: RunningStep) -> None:
        """End a step's lanes where they are, once a plan is in force. It is complete then, unless a
        tick is under way or another rank needs rows of this one."""
        while not running.complete:
            machine = running.machine
            self._post(machine.stop)
            if self._goes_home(running, time.monotonic()):
                continue
            with self.lock:
                if machine.failure or machine.is_complete or not machine.can_stop:
                    return
                machine.still_waiting(time.monotonic(), can_be_planned=self._link.connected)
                self.lock.wait(CHECK_SECONDS)
            self._link.check()

    def end(self, running: RunningStep, why: str) -> None:
        """The step's block has ended; ``why``, if it was not run to its end. Its rows may still be
        asked for if it was."""
        running.close()
        self._post(self._machine.end_step, running.step, why)
        self._forget_finished()

    def send(
        self,
        running: RunningStep,
        tick: Tick,
        inputs: Tensors,
        outputs: Tensors,
        carried: Tensors,
        *,
        copies_keys: bool,
    ) -> SentTick:
        """The training loop has the rows of a tick; see :meth:`Ticks.send`."""
        if running.closed:
            raise CoreAttentionFailed(
                f"step {running.step} is over; run backward inside the step's block"
            )
        kept = Unwritten(tick, inputs)
        kept_carried = Unwritten(tick, carried) if carried else None
        written = record_event(self._device)
        sent = SentTick(tick, kept, kept_carried, copies_keys, outputs, written)
        running.sent[tick] = sent
        with self.lock:
            send = running.machine.begin(tick)
        if send is not None:
            self._send(running, sent, send)
        return sent

    def wait(self, running: RunningStep, sent: SentTick) -> None:
        """Waits until ``sent`` is complete; see :meth:`Ticks.wait`."""
        began = record_event(self._device, timed=True)
        sent.waited_since = time.monotonic()
        say_at = sent.waited_since + WAITING_SECONDS
        while not sent.complete:
            if running.machine.at_home:
                self._compute(running, sent)
                break
            epoch, awaited = self._under_way(running, sent)
            is_stuck = awaited is None or time.monotonic() > sent.waited_since + WAITING_SECONDS
            if is_stuck and self._goes_home(running, sent.waited_since + DOUBT_SECONDS):
                continue
            if time.monotonic() > say_at:
                say_at += WAITING_SECONDS
                self._say_waiting(running, sent, under_way=awaited is not None)
            if awaited is not None:
                try:
                    pending = next((reply for reply in awaited if not reply.arrived()), None)
                except ExchangeFailed as error:
                    self._server_failed(running, sent, epoch, error)
                    continue
                if pending is None:
                    # Servers of this process have read them only now, and examiners do after this.
                    sent.check()
                    self._examine(running, sent, epoch)
                    continue
                pending.wait(CHECK_SECONDS)
            self._link.check()
        self._count_wait(running, sent, began)

    def may_be_asked(self, last_step: int) -> bool:
        """Return whether other ranks may still ask for rows of ``last_step`` or an earlier step."""
        with self.lock:
            return self._machine.may_be_asked(last_step)

    def is_finished(self, step: int) -> bool:
        """Return whether every rank that has not left has finished ``step`` and those before."""
        return self._machine.is_finished(step)

    def close(self) -> None:
        """Ends the thread, after what it does at the moment."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # What the control plane says; see trainer_client.link.control_link.

    @property
    def epoch(self) -> int:
        """The highest seen; plans of lower ones are void."""
        return self._machine.epoch

    @property
    def next_step(self) -> int:
        """Steps before it have been begun or left out."""
        return self._machine.next_step

    @property
    def position(self) -> tuple[int, Sequence[int]]:
        """``next_step``; and if it has been begun itself, the ticks sent of each nano-batch."""
        with self.lock:
            step = self._machine.next_step
            running = self._machine.running(step)
            return step, [] if running is None else [lane.begun_ticks for lane in running.lanes]

    @property
    def first_unknown(self) -> int:
        """The number after all steps that this rank knows of, its own and others'."""
        with self.lock:
            return self._machine.first_unknown

    def manifests(self) -> Sequence[HandedInStep]:
        """The manifests of unfinished steps, in order."""
        with self.lock:
            return self._machine.manifests

    def opened(self, opened: jobs_pb2.JobOpened) -> None:
        """The job is there."""
        self._job = JobDescription.from_proto(opened)
        self._exchanger = Exchanger(
            job=self._job,
            pool=self._pool,
            in_place=self._in_place,
            examiner=self._examiner,
            liveness=self._liveness,
            device=self._device,
            rank_ping_seconds=self._options.rank_ping_seconds,
            deadline_seconds=self._options.tick_timeout_seconds,
        )
        self._in_place.open_job(self._job)

    def refused(self, step: int, sequence: int, why: str) -> None:
        """The control plane does not take a manifest."""
        if sequence:
            self._post(self._machine.refuse_hand_in, sequence, why)
        else:
            self._post(self._machine.refuse, step, why)

    def planned(self, planned: PlannedStep) -> None:
        """A plan has come, for a step to come or for one that is under way."""
        plan = planned.plan
        self._number(planned.sequence, plan.step)
        first_ticks = planned.first_ticks(self._options.rank, self._options.n_nano_batches)
        outline = PlanOutline(plan.step, plan.epoch, planned, first_ticks)
        self._post(self._machine.plan_came, outline, time.monotonic())

    def _number(self, sequence: int, step: int) -> None:
        with self.lock:
            handed_in = self._machine.joining(sequence)
            if handed_in is not None:
                self._machine.numbered(sequence, step, numbered(handed_in, step))
            elif sequence:
                self._machine.numbered_late(sequence, step)

    def failed(self, step: int, why: str, sequence: int) -> None:
        """A step gets no plan any more."""
        self._number(sequence, step)
        self._post(self._machine.step_failed, step, why)

    def recover(self, epoch: int, lost: Sequence[str], why: str) -> None:
        """Plans of epochs below ``epoch`` are void."""
        self._post(self._machine.recover, epoch, lost, why, time.monotonic())

    def finished(self, step: int) -> None:
        """Every rank has finished ``step`` and those before."""
        self._post(self._machine.all_finished, step)
        self._forget_finished()

    def broken(self) -> None:
        """The link has ended: those who wait look at it."""
        with self.lock:
            self.lock.notify_all()

    # The machine and what it wants done.

    def _post(
        self, decide: Callable[_P, _Instructions], *facts: _P.args, **named: _P.kwargs
    ) -> None:
        """Hands what has happened to a method of the machine, and does what it says."""
        with self.lock:
            instructions = decide(*facts, **named)
            self.lock.notify_all()
        self._carry_out(instructions)

    def _carry_out(self, instructions: _Instructions, *, connects: bool = False) -> None:
        """Without the lock. Connects on this thread if it ``connects``, else on this module's."""
        for instruction in instructions:
            match instruction:
                case SendTick() | TakeIn() | LetGo() | ForgetQueries() | ForgetInputs():
                    running = self._running.get(instruction.tick.step)
                    if running is not None:
                        self._treat(running, running.sent[instruction.tick], instruction)
                case EndLane(first, epoch):
                    self._end_lane(first, epoch)
                case ReportReplay(number, epoch):
                    self._post(self._machine.replay_sent, number, epoch, time.monotonic())
                case CountRecovery():
                    self._count_recovery(instruction)
                case DeriveAhead(planned):
                    self._thread.submit(self._derive_ahead, planned)
                case PlanOwnServer(outline):
                    self._plan_own_server(outline)
                case Connect() if connects:
                    self._connect(instruction)
                case Connect():
                    self._thread.submit(self._resume, instruction)
                case CloseConnections(why):
                    self._servers.close_all(why)
                case RecoverOwnServer(epoch, why):
                    logger.warning("job %s: %s", self._link.job_id, why)
                    self._in_place.recover(self._link.job_id, epoch)
                case AbandonOwnServer(first_step):
                    self._in_place.abandon(self._link.job_id, self._options.rank, first_step)
                case ReportProgress(epoch, steps):
                    self._link.report_progress(epoch, list(map(_progress_to_proto, steps)))
                case ReportLost(server_id, epoch, cause, detail):
                    self._link.make_sure()
                    self._link.report_lost(
                        ServerLoss(server_id=server_id, epoch=epoch, cause=cause, detail=detail)
                    )
                case ReportGivenUp(number, why):
                    reason = why[:_MAX_REASON_LETTERS]
                    self._link.report(number, jobs_pb2.StepGivenUp(reason=reason))

    def _treat(
        self,
        running: RunningStep,
        sent: SentTick,
        instruction: SendTick | TakeIn | LetGo | ForgetQueries | ForgetInputs,
    ) -> None:
        """Carries out what concerns one tick."""
        match instruction:
            case SendTick():
                self._send(running, sent, instruction)
            case TakeIn(epoch=epoch):
                self._take_in(running, sent, epoch)
            case LetGo(epoch=epoch):
                self._let_go(sent, epoch)
            case ForgetQueries():
                sent.forget_queries()
            case ForgetInputs():
                sent.forget_inputs()

    def _forget_finished(self) -> None:
        with self.lock:
            for number in [n for n in self._running if self._machine.running(n) is None]:
                del self._running[number]
            for number in [n for n in self._routes if self._machine.is_finished(n)]:
                del self._routes[number]

    # Plans.

    def _plan_own_server(self, outline: _Outline) -> None:
        # First, since whoever waits for the plan begins the step at once.
        planned = outline.plan
        self._in_place.add_plan(
            self._link.job_id,
            planned.plan,
            forward_only=planned.forward_only,
            first_tick=planned.first_tick,
        )
        self._post(self._machine.own_server_planned, outline)

    def _resume(self, wanted: Connect[PlannedStep]) -> None:
        try:
            self._connect(wanted)
        except Exception as error:
            # Whatever breaks this thread would leave the training loop waiting: hand it over.
            logger.exception("step %d cannot go on", wanted.step)
            why = str(error) if isinstance(error, SessionError) else repr(error)
            self._post(self._machine.replay_broke, wanted.step, f"its replay failed: {why}")

    def _connect(self, wanted: Connect[PlannedStep]) -> None:
        planned, step, epoch = wanted.plan, wanted.step, wanted.epoch
        try:
            connections = self._servers.connect(
                planned.plan, wanted.first_step, wanted=lambda: self._is_wanted(step, epoch)
            )
        except NotWanted as error:
            logger.info("step %d: %s; waiting for its next plan", step, error)
            return
        except Unreachable as error:
            details = {server_id: str(why) for server_id, why in error.causes.items()}
            self._post(self._machine.unreachable, step, epoch, LossCause.UNREACHABLE, details)
            return
        routes = self._routes_under(planned)
        routes.connect(connections)
        with self.lock:
            instructions = self._machine.connected(step, epoch, time.monotonic())
            running = self._running.get(step)
            if running is not None and running.machine.is_under(epoch):
                running.in_force, self._is_at_home = routes, False
        self._carry_out(instructions)

    def _is_wanted(self, step: int, epoch: int) -> bool:
        with self.lock:
            return self._machine.is_wanted(step, epoch)

    def _routes_under(self, planned: PlannedStep) -> Routes:
        routes = self._routes.get(planned.plan.step)
        # Those of an earlier epoch are of another plan.
        return routes if routes and routes.plan is planned.plan else self._make_routes(planned)

    def _make_routes(self, planned: PlannedStep) -> Routes:
        assert self._job is not None
        return Routes(
            planned.plan,
            planned.first_tick,
            rank=self._options.rank,
            own_server_id=self._in_place.server_id,
            job=self._job,
            device=self._device,
        )

    def _derive_ahead(self, planned: PlannedStep) -> None:
        """Before the step begins: its ticks should not wait for it."""
        try:
            routes = self._make_routes(planned)
            phases = [Phase.FORWARD] if planned.forward_only else list(Phase)
            self._pool.reserve(self, routes.derive_ahead(phases))
        except Exception:
            # The step does both itself, and raises what is wrong.
            logger.exception("step %d cannot be prepared ahead", planned.plan.step)
            return
        with self.lock:
            outline = self._machine.outline_of(planned.plan.step)
            if outline is not None and outline.plan is planned:
                self._routes[planned.plan.step] = routes

    # Ticks.

    def _under_way(
        self, running: RunningStep, sent: SentTick
    ) -> tuple[int, Sequence[Awaited] | None]:
        """The epoch and replies that a tick waits for; without replies after a short wait for a
        plan."""
        tick = sent.tick
        with self.lock:
            machine = self._machine.running(tick.step)
            failure = machine.failure if machine is not None else "the step is over"
            if machine is None or failure:
                raise CoreAttentionFailed(f"{tick}: {failure}")
            epoch = machine.at(tick).under_way_in
            if epoch is not None:
                return epoch, sent.awaited[epoch]
            machine.still_waiting(time.monotonic(), can_be_planned=self._link.connected)
            self.lock.wait(CHECK_SECONDS)
        return 0, None

    def _goes_home(self, running: RunningStep, doubt_at: float) -> bool:
        """Have this rank compute the rest of a step that no new plan is to be expected for, if its
        documents are whole on it; return whether it does."""
        lanes = range(self._options.n_nano_batches)
        if not self._is_away(doubt_at) or not running.machine.can_go_home:
            return False
        if any(whole_documents(running, nano_batch) is None for nano_batch in lanes):
            return False
        self._post(self._machine.go_home, running.step, time.monotonic())
        self._count_at_home(running)
        return True

    def _count_at_home(self, running: RunningStep) -> None:
        self._metrics.series.steps_at_home_total.inc()
        if not self._is_at_home:
            logger.warning(
                "job %s: the control plane is away; from step %d on this rank computes itself what "
                "no server does",
                self._link.job_id,
                running.step,
            )
        self._is_at_home = True

    def _compute(self, running: RunningStep, sent: SentTick) -> None:
        """Compute a tick at home, in a job that has not ended."""
        self._link.check()
        tasks = whole_documents(running, sent.tick.nano_batch)
        assert tasks is not None
        # This process's server may still write to those that it was given.
        sent.outputs = {name: torch.empty_like(tensor) for name, tensor in sent.outputs.items()}
        if sent.tick.phase is Phase.BACKWARD:
            sent.gradients = sent.zero_gradients(running.job.shape)
        outputs = {**sent.outputs, **sent.gradients}
        compute_documents(sent.tick, tasks, running.job, sent.rows(), outputs)
        sent.complete = True
        self._post(running.machine.computed, sent.tick)

    def _say_waiting(self, running: RunningStep, sent: SentTick, *, under_way: bool) -> None:
        """Other ranks may be waiting for this one in the same way."""
        needed = running.needed_ranks(sent.tick)
        if not needed or not under_way:
            return
        with self.lock:
            sent_ticks = [lane.begun_ticks for lane in running.machine.lanes]
        self._link.report(
            running.step,
            jobs_pb2.StepWaiting(
                nano_batch=sent.tick.nano_batch,
                tick=sent.tick.lane_index(self._options.layer_ticks),
                sent_ticks=sent_ticks,
                needed_ranks=needed,
            ),
        )

    def _send(self, running: RunningStep, sent: SentTick, instruction: SendTick) -> None:
        tick, epoch = sent.tick, instruction.epoch
        routes, outputs = running.in_force, sent.outputs
        with self.lock:
            is_void = not running.machine.is_under(epoch)
            if is_void or routes is None or routes.plan.epoch != epoch:
                running.machine.not_sent(tick, epoch)
                return
        inputs = sent.rows()
        if not inputs:
            return
        if instruction.only_rows:
            if tick.phase is Phase.BACKWARD:
                # The training loop goes on, and may write to them before this process's server
                # reads them. Keys of forward ticks are copies, or autograd finds it out.
                inputs = {name: tensor.clone() for name, tensor in inputs.items()}
                sent.check()
            # The training loop has its outputs.
            outputs = {
                name: torch.empty_like(tensor, device=self._device)
                for name, tensor in outputs.items()
            }
        if "q" not in inputs:
            # Whatever comes back for these queries is let go; they must only be finite.
            rows, shape = len(inputs["k"]), running.job.shape
            inputs = {"q": inputs["k"].new_zeros(rows, shape.num_heads, shape.head_dim), **inputs}
        awaited: list[Awaited] = []
        failure: ExchangeFailed | None = None
        assert self._exchanger is not None
        for exchange in routes.of(tick):
            try:
                awaited.append(self._exchanger.send(exchange, epoch, tick, inputs, outputs))
            except ExchangeFailed as error:
                # The others are sent it all the same, so that all have got as far.
                failure = failure or error
                continue
            if exchange.connection is not None:
                running.sent_bytes += exchange.request.nbytes
                running.received_bytes += exchange.reply.nbytes
        if failure is not None:
            for reply in awaited:
                reply.let_go()
            self._server_failed(running, sent, epoch, failure)
            return
        if instruction.only_rows:
            for reply in awaited:
                reply.let_go()
            return
        # Taken in in the plan's order, whatever the order of sending.
        awaited.sort(key=lambda each: each.exchange.route.server)
        sent.sent_at = time.monotonic()
        sent.awaited[epoch] = awaited
        with self.lock:
            is_wanted = running.machine.under_way(tick, epoch)
            self.lock.notify_all()
        if not is_wanted:
            self._let_go(sent, epoch)

    def _examine(self, running: RunningStep, sent: SentTick, epoch: int) -> None:
        """All replies are here: takes them in, if they are right."""
        with self.lock:
            if not running.machine.replies_here(sent.tick, epoch):
                return
        try:
            for reply in sent.awaited[epoch]:
                reply.examine()
        except ExchangeFailed as error:
            self._server_failed(running, sent, epoch, error)
        else:
            self._post(running.machine.examined, sent.tick, epoch)

    def _take_in(self, running: RunningStep, sent: SentTick, epoch: int) -> None:
        awaited = sent.awaited.pop(epoch)
        if sent.tick.phase is Phase.BACKWARD:
            sent.gradients = sent.zero_gradients(running.job.shape)
        answered_at = max([sent.sent_at, *(reply.ended_at for reply in awaited)])
        for reply in awaited:
            reply.take_in(sent.outputs, sent.gradients)
        # On a GPU rows go when they have been computed, not when they are handed over.
        first_gone_at = min((each.began_at for each in awaited if each.began_at), default=0.0)
        sent.answered_at = answered_at
        sent.flight_seconds = max(answered_at - max(sent.sent_at, first_gone_at), 0.0)
        sent.complete = True

    def _count_wait(
        self, running: RunningStep, sent: SentTick, began: torch.cuda.Event | None
    ) -> None:
        phase, flight_seconds = sent.tick.phase, sent.flight_seconds
        ended = record_event(self._device, timed=True)
        if began is not None and ended is not None:
            running.device_waits.append(DeviceWait(phase, flight_seconds, began, ended))
            return
        exposed_seconds = max(sent.answered_at - max(sent.waited_since, sent.sent_at), 0.0)
        running.waits.append(TickWait(phase, flight_seconds, exposed_seconds))

    def _server_failed(
        self, running: RunningStep, sent: SentTick, epoch: int, error: ExchangeFailed
    ) -> None:
        self._post(
            running.machine.server_failed,
            sent.tick,
            epoch,
            error.server_id,
            error.cause,
            error.detail,
            time.monotonic(),
        )

    def _let_go(self, sent: SentTick, epoch: int) -> None:
        for _ in range(sent.let_go(epoch)):
            self._metrics.series.stale_results_total.inc()

    def _end_lane(self, first: Tick, epoch: int) -> None:
        """Ends a lane at each server, with its first tick from ``first`` on."""
        running, n_layers = self._running.get(first.step), self._options.layer_ticks
        routes = self._routes_of(running, epoch) if running is not None else None
        if running is None or routes is None or self._exchanger is None:
            return
        backward = not running.forward_only
        lane = ticks_of_lane(first.step, first.nano_batch, n_layers, backward=backward)
        told: set[str] = set()
        for tick in islice(lane, first.lane_index(n_layers), None):
            for exchange in routes.of(tick):
                if exchange.server_id not in told:
                    told.add(exchange.server_id)
                    self._exchanger.skip(exchange, epoch, tick)

    def _routes_of(self, running: RunningStep, epoch: int) -> Routes | None:
        """The routes of a running step under the plan of an epoch; of one that the step takes no
        part in, with the connections that there are."""
        outline = self._machine.outline_of(running.step)
        if running.in_force is not None and running.in_force.plan.epoch == epoch:
            return running.in_force
        if outline is None or outline.epoch != epoch:
            return None
        routes = self._make_routes(outline.plan)
        routes.connect(self._servers.connected_to(outline.plan.plan))
        return routes

    def _count_recovery(self, counted: CountRecovery) -> None:
        running = self._running.get(counted.step)
        routes = running.in_force if running is not None else None
        if running is None or routes is None:
            return
        running.recoveries += 1
        running.replayed_ticks += len(counted.replayed)
        running.recovery_seconds += counted.seconds
        self._metrics.series.recovery_seconds.observe(counted.seconds)
        for tick in counted.replayed:
            at_home = all(each.connection is None for each in routes.of(tick))
            where = "home" if at_home else "server"
            series = self._metrics.series.at(phase=tick.phase, where=where)
            series.replayed_ticks_total.inc()
        logger.info(
            "step %d goes on with epoch %d: %d ticks replayed after %.3f s",
            counted.step,
            counted.epoch,
            len(counted.replayed),
            counted.seconds,
        )


def _progress_to_proto(progress: Progress) -> jobs_pb2.StepProgress:
    return jobs_pb2.StepProgress(
        step=progress.step, complete_ticks=progress.complete_ticks, done=progress.done
    )
