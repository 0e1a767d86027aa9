"""Every wait that can run out, in one table: who waits, for what, how long, and what happens then.

Defaults are written here alone: settings and constants take theirs with :func:`default_seconds`.
(The data plane stands below this package and holds its own two; a test compares them.)

``docs/configuration.md`` shows the table. Some of the times must stand in an order, or the wrong
one runs out first and names the wrong culprit; :func:`check_order` holds what a process knows of
them against that order when it starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class TimeoutOrderError(ValueError):
    """Timeouts contradict each other; the message names both, their values and what to do."""


@dataclass(frozen=True, kw_only=True)
class Timeout:
    """A wait that can run out.

    Attributes:
        name: of the setting, unique in the table.
        seconds: by default.
        who: waits.
        what: is awaited.
        then: what happens when it runs out.
        option: how an operator sets it; empty if it is fixed.
    """

    name: str
    seconds: float
    who: str
    what: str
    then: str
    option: str = ""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The sum of some timeouts must be less than another one.

    Attributes:
        shorter: names of the timeouts that are summed.
        longer: name of the other one.
        why: what goes wrong otherwise.
    """

    shorter: tuple[str, ...]
    longer: str
    why: str


TIMEOUTS = (
    # Finding out that something is wrong.
    Timeout(
        name="ping_quiet_seconds",
        seconds=0.5,
        who="rank",
        what="anything from a server that owes it a reply",
        then="the server's transport is asked for a sign of life",
        option="SessionOptions",
    ),
    Timeout(
        name="ping_timeout_seconds",
        seconds=2.5,
        who="rank",
        what="the sign of life (and the time of the messages under way)",
        then="the server counts as lost: recovery",
        option="SessionOptions",
    ),
    Timeout(
        name="blocked_seconds",
        seconds=20.0,
        who="rank",
        what="the same of a server in another rank's process on a GPU: a call of CUDA may hold up "
        "all of its threads",
        then="the server counts as lost: recovery",
    ),
    Timeout(
        name="lease_seconds",
        seconds=15.0,
        who="control plane",
        what="a heartbeat of a server or rank; they send one every third of it",
        then="a server is fenced and its jobs recover; a rank's job is closed",
        option="control-plane --lease-seconds",
    ),
    Timeout(
        name="renewal_seconds",
        seconds=3.0,
        who="rank, server",
        what="the answer to a renewal of its lease",
        then="the control plane counts as away: it is looked for at its next address",
    ),
    Timeout(
        name="broken_stream_seconds",
        seconds=7.0,
        who="control plane",
        what="a rank whose stream of events has broken to be heard again",
        then="it is dead: its job is closed",
    ),
    Timeout(
        name="lost_rank_seconds",
        seconds=3.0,
        who="control plane",
        what="the same, if a server's connection to the rank was reset: its process is gone",
        then="the same",
    ),
    Timeout(
        name="stall_seconds",
        seconds=10.0,
        who="control plane",
        what="a server that has work to finish some, as its heartbeats tell",
        then="it is fenced and its jobs recover",
    ),
    Timeout(
        name="stuck_seconds",
        seconds=60.0,
        who="server",
        what="its own device to finish some of its work",
        then="the process exits, to be started again",
    ),
    # Ticks, plans and recoveries.
    Timeout(
        name="tick_timeout_seconds",
        seconds=120.0,
        who="rank",
        what="a tick's reply, whatever the reason; or keys of a window that another rank has",
        then="the server counts as lost: recovery; without the keys the step fails",
        option="train --tick-timeout-seconds",
    ),
    Timeout(
        name="reply_timeout_seconds",
        seconds=120.0,
        who="server",
        what="a rank that takes its reply",
        then="the connection to the rank is closed",
    ),
    Timeout(
        name="answer_seconds",
        seconds=30.0,
        who="control plane",
        what="the ranks' answers to a recovery",
        then="the job is closed; the reason names the ranks",
    ),
    Timeout(
        name="leave_seconds",
        seconds=5.0,
        who="control plane",
        what="the other ranks to leave too, when one has left before the end of a planned step",
        then="recovery; steps that need its rows fail, with the reason",
    ),
    Timeout(
        name="recovery_timeout_seconds",
        seconds=60.0,
        who="rank",
        what="a new plan of a step that lost a server, while the control plane is there",
        then="the step fails",
        option="train --recovery-timeout-seconds",
    ),
    Timeout(
        name="plan_timeout_seconds",
        seconds=60.0,
        who="rank",
        what="the plan of a step, while the control plane is there",
        then="the step fails; the error names the ranks that are late",
        option="train --plan-timeout-seconds",
    ),
    Timeout(
        name="control_plane_timeout_seconds",
        seconds=300.0,
        who="rank, server",
        what="a control plane that is away",
        then="the rank's job ends; the server exits",
        option="train --control-plane-timeout-seconds",
    ),
    Timeout(
        name="collective_timeout_seconds",
        seconds=600.0,
        who="rank",
        what="the other ranks, in a collective of torch.distributed (NCCL's default)",
        then="the training process ends",
        option="init_process_group(timeout=...)",
    ),
    Timeout(
        name="longest_wait_seconds",
        seconds=2.0,
        who="rank, server",
        what="nothing, between two attempts to reach the control plane",
        then="the next attempt",
    ),
    Timeout(
        name="rejoin_seconds",
        seconds=2.5,
        who="control plane",
        what="servers to register again, after its own start",
        then="jobs from before recover with those that have",
    ),
    Timeout(
        name="leader_lease_seconds",
        seconds=10.0,
        who="standby control plane",
        what="the leader to renew its Kubernetes Lease",
        then="it takes over",
    ),
    Timeout(
        name="leader_renew_seconds",
        seconds=7.0,
        who="leading control plane",
        what="its Kubernetes Lease to be renewed",
        then="it gives up leading",
    ),
    Timeout(
        name="lock_lease_seconds",
        seconds=6.0,
        who="standby control plane",
        what="the leader, which is stopped, to touch its lock file (that of a dead one is free at "
        "once)",
        then="it takes over",
    ),
    Timeout(
        name="kubernetes_call_seconds",
        seconds=5.0,
        who="control plane",
        what="the answer of the Kubernetes API",
        then="the call counts as failed, and is made again",
    ),
    # Connections.
    Timeout(
        name="start_timeout_seconds",
        seconds=180.0,
        who="rank",
        what="the control plane, at start",
        then="the job does not start",
        option="train --start-timeout-seconds",
    ),
    Timeout(
        name="announced_seconds",
        seconds=120.0,
        who="server",
        what="a job that it serves to be announced again, after it has registered",
        then="the job is closed there",
    ),
    Timeout(
        name="connect_timeout_seconds",
        seconds=20.0,
        who="rank",
        what="a connection to a server, with its bandwidth probe",
        then="the server counts as lost: recovery",
        option="train --connect-timeout-seconds",
    ),
    Timeout(
        name="handshake_timeout_seconds",
        seconds=5.0,
        who="server",
        what="the hello of a rank that has connected",
        then="the connection is closed",
    ),
    Timeout(
        name="max_unclaimed_seconds",
        seconds=600.0,
        who="rank, server",
        what="the offer of a message that has come early",
        then="the message is dropped; the connection of an offer that comes still later fails",
    ),
    Timeout(
        name="connect_seconds",
        seconds=180.0,
        who="server",
        what="the control plane, at start",
        then="the process exits with an error",
        option="attention-node --connect-seconds",
    ),
    Timeout(
        name="call_seconds",
        seconds=10.0,
        who="rank, server",
        what="the answer to a gRPC call",
        then="the call is made again",
    ),
    Timeout(
        name="reach_seconds",
        seconds=2.0,
        who="rank, server",
        what="one address of the control plane to accept a connection",
        then="its next address",
    ),
    Timeout(
        name="keepalive_seconds",
        seconds=30.0,
        who="rank, server",
        what="anything on an idle gRPC connection",
        then="a gRPC ping",
    ),
    Timeout(
        name="keepalive_timeout_seconds",
        seconds=10.0,
        who="rank, server",
        what="the answer to the gRPC ping",
        then="the connection is made anew",
    ),
    Timeout(
        name="server_keepalive_seconds",
        seconds=60.0,
        who="control plane, server",
        what="anything on a gRPC connection from a client",
        then="a gRPC ping",
    ),
    Timeout(
        name="server_keepalive_timeout_seconds",
        seconds=20.0,
        who="control plane, server",
        what="the answer to the gRPC ping",
        then="the connection is closed, and its calls end",
    ),
    Timeout(
        name="server_handshake_seconds",
        seconds=10.0,
        who="control plane, server",
        what="the TLS and HTTP/2 handshakes of a new connection",
        then="the connection is closed",
    ),
    Timeout(
        name="handshake_seconds",
        seconds=10.0,
        who="control plane",
        what="the first call on a new TLS connection",
        then="the connection counts as refused",
    ),
    Timeout(
        name="idle_connection_seconds",
        seconds=600.0,
        who="control plane, server",
        what="a call on a connection that has none",
        then="the connection is closed",
    ),
    Timeout(
        name="scrape_seconds",
        seconds=10.0,
        who="rank, server, control plane",
        what="the request on a connection to /metrics",
        then="the connection is closed",
    ),
    Timeout(
        name="lane_deadline_seconds",
        seconds=86400.0,
        who="server",
        what="a rank's next rows: the model computes, evaluates or saves meanwhile (a rank that is "
        "gone is found by its connection or its lease)",
        then="the connection is closed",
    ),
    # Ending.
    Timeout(
        name="drain_seconds",
        seconds=30.0,
        who="server",
        what="planned steps to finish, after SIGTERM or a drain",
        then="it leaves: recovery without it",
        option="attention-node --drain-seconds",
    ),
    Timeout(
        name="unserved_seconds",
        seconds=3.0,
        who="server",
        what="a rank or the control plane, while it drains and has neither",
        then="it leaves with planned steps unfinished",
    ),
    Timeout(
        name="flush_seconds",
        seconds=5.0,
        who="rank, server",
        what="the answers to its last reports, when it leaves",
        then="it leaves without them",
    ),
    Timeout(
        name="stop_seconds",
        seconds=5.0,
        who="control plane",
        what="calls under way, after SIGTERM",
        then="they are cancelled",
    ),
    Timeout(
        name="close_seconds",
        seconds=5.0,
        who="rank, server",
        what="its own threads to end",
        then="they end with the process",
    ),
    Timeout(
        name="termination_grace_seconds",
        seconds=60.0,
        who="Kubernetes, Docker",
        what="a container to end, after SIGTERM",
        then="SIGKILL",
        option="terminationGracePeriodSeconds (the chart: drainSeconds + 30), stop_grace_period",
    ),
    # Commands.
    Timeout(
        name="local_start_seconds",
        seconds=300.0,
        who="local",
        what="a process to serve",
        then="the run ends",
    ),
    Timeout(
        name="local_stop_seconds",
        seconds=60.0,
        who="local",
        what="trainers to finish their step and save, after Ctrl-C",
        then="they are terminated",
    ),
    Timeout(
        name="local_terminate_seconds",
        seconds=8.0,
        who="local",
        what="a process to end, after SIGTERM",
        then="SIGKILL",
    ),
    Timeout(
        name="ask_seconds",
        seconds=5.0,
        who="health, top",
        what="an answer",
        then="the command fails",
        option="health --timeout-seconds, top --timeout-seconds",
    ),
    Timeout(
        name="probe_seconds",
        seconds=20.0,
        who="doctor",
        what="the answers of a second process, over one way",
        then="the check fails",
        option="doctor --probe-seconds",
    ),
    Timeout(
        name="first_words_seconds",
        seconds=2.0,
        who="doctor",
        what="a connection, and what a server says first, of each protocol that is tried",
        then="it speaks another protocol",
    ),
    Timeout(
        name="rehearsal_seconds",
        seconds=300.0,
        who="doctor",
        what="all kernels of one shape, compiled and run",
        then="the check fails",
    ),
)

ORDERS = (
    Order(
        shorter=("ping_quiet_seconds", "ping_timeout_seconds"),
        longer="tick_timeout_seconds",
        why="a tick's deadline cannot tell a server that is cut off from a rank that is late",
    ),
    Order(
        shorter=("lease_seconds",),
        longer="tick_timeout_seconds",
        why="a rank that dies would be taken for a server that does not answer",
    ),
    Order(
        shorter=("stall_seconds",),
        longer="tick_timeout_seconds",
        why="ranks would give up a server that does no work before the control plane fences it",
    ),
    Order(
        shorter=("stall_seconds",),
        longer="stuck_seconds",
        why="a server that is slow for a moment would exit where it could have been left out",
    ),
    Order(
        shorter=("lease_seconds",),
        longer="reply_timeout_seconds",
        why="a rank that dies ends its job by its lease, with a reason that names it",
    ),
    Order(
        shorter=("lease_seconds", "connect_timeout_seconds"),
        longer="recovery_timeout_seconds",
        why="a recovery must outlast a rank's death and one more server that cannot be reached",
    ),
    Order(
        shorter=("answer_seconds", "connect_timeout_seconds"),
        longer="recovery_timeout_seconds",
        why="ranks would give up a recovery while the control plane still waits for one of them",
    ),
    Order(
        shorter=("leader_renew_seconds",),
        longer="leader_lease_seconds",
        why="two control planes would lead at a time",
    ),
    Order(
        shorter=("leader_lease_seconds",),
        longer="control_plane_timeout_seconds",
        why="jobs would end before a standby takes over",
    ),
    Order(
        shorter=("longest_wait_seconds",),
        longer="lost_rank_seconds",
        why="a rank would be taken for dead that is about to ask for the control plane again",
    ),
    Order(
        shorter=("lost_rank_seconds",),
        longer="broken_stream_seconds",
        why="a rank whose process is gone would be waited for longer than one that may be there",
    ),
    Order(
        shorter=("renewal_seconds",),
        longer="lease_seconds",
        why="a lease would run out while one waits for the answer to its renewal",
    ),
    Order(
        shorter=("longest_wait_seconds",),
        longer="rejoin_seconds",
        why="jobs would recover without servers that are on their way back",
    ),
    Order(
        shorter=("handshake_timeout_seconds",),
        longer="connect_timeout_seconds",
        why="a listener that waits for a hello would outlast the rank that connects",
    ),
    Order(
        shorter=("tick_timeout_seconds", "recovery_timeout_seconds"),
        longer="collective_timeout_seconds",
        why="the ranks that wait for one in a recovery would end before it is through",
    ),
    Order(
        shorter=("control_plane_timeout_seconds", "recovery_timeout_seconds"),
        longer="collective_timeout_seconds",
        why="the ranks that wait for one without a plan would end before the control plane is back",
    ),
    Order(
        shorter=("plan_timeout_seconds",),
        longer="collective_timeout_seconds",
        why="the ranks that wait for one without a plan would end first, naming no reason",
    ),
    Order(
        shorter=("drain_seconds",),
        longer="termination_grace_seconds",
        why="the container would be killed in the middle of a drain",
    ),
    Order(
        shorter=("stop_seconds",),
        longer="termination_grace_seconds",
        why="the container would be killed while its calls end",
    ),
)


def timeout(name: str) -> Timeout:
    """The timeout of that name."""
    return _BY_NAME[name]


def default_seconds(name: str) -> float:
    """How long the wait of that name takes by default."""
    return timeout(name).seconds


def check_order(known: Mapping[str, float]) -> None:
    """Checks every order of which all timeouts are known.

    Args:
        known: seconds by name; names that are not in the table are a mistake of the caller.

    Raises:
        TimeoutOrderError: some contradict each other; names all that do.
        KeyError: a name is not in the table.
    """
    for name in known:
        timeout(name)
    problems = [
        _problem(order, known)
        for order in ORDERS
        if known.keys() >= {*order.shorter, order.longer}
        and not sum(known[name] for name in order.shorter) < known[order.longer]
    ]
    if problems:
        raise TimeoutOrderError("; ".join(problems))


def known_timeouts(*settings: object) -> dict[str, float]:
    """The timeouts of the table that ``settings`` have as attributes, by name."""
    return {
        name: float(getattr(each, name))
        for each in settings
        for name in _BY_NAME
        if hasattr(each, name)
    }


def as_markdown() -> str:
    """The table and the orders, as ``docs/configuration.md`` shows them."""
    rows = (
        (
            f"`{each.name}`",
            f"{each.seconds:g} s",
            each.who,
            each.what,
            each.then,
            _code(each.option),
        )
        for each in TIMEOUTS
    )
    orders = (
        (
            " + ".join(f"`{name}`" for name in order.shorter),
            f"`{order.longer}`",
            order.why,
        )
        for order in ORDERS
    )
    table = _table(("timeout", "default", "who waits", "for what", "then", "set by"), rows)
    return f"{table}\n\n{_table(('must be less', 'than', 'or else'), orders)}\n"


def _problem(order: Order, known: Mapping[str, float]) -> str:
    shorter = " + ".join(f"{name} {known[name]:g}" for name in order.shorter)
    return (
        f"{shorter} must be less than {order.longer} {known[order.longer]:g}, or else "
        f"{order.why}: lower the former or raise the latter"
    )


def _code(option: str) -> str:
    return f"`{option}`" if option else ""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [tuple(head)]
    lines.append(("---",) * len(lines[0]))
    lines.extend(tuple(row) for row in rows)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_BY_NAME = {each.name: each for each in TIMEOUTS}
