"""Every wait that can run out, in one table: who waits, for what, how long, and what happens then.

``docs/timeouts.md`` shows the table. Some of the times must stand in an order, or the wrong one
runs out first and names the wrong culprit; :func:`check_order` holds what a process knows of them
against that order when it starts.
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
        where: ``module:Class.field`` or ``module:CONSTANT`` that holds the default; empty for what
            another program holds.
        option: how an operator sets it; empty if it is fixed.
    """

    name: str
    seconds: float
    who: str
    what: str
    then: str
    where: str
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
        seconds=2.0,
        who="rank",
        what="anything from a server that owes it a reply",
        then="the server's transport is asked for a sign of life",
        where="trainer_client.options:SessionOptions.ping_quiet_seconds",
        option="SessionOptions",
    ),
    Timeout(
        name="ping_timeout_seconds",
        seconds=5.0,
        who="rank",
        what="the sign of life (and 1 s for each 16 MiB that are under way to or from the server)",
        then="the server counts as lost: recovery",
        where="trainer_client.options:SessionOptions.ping_timeout_seconds",
        option="SessionOptions",
    ),
    Timeout(
        name="lease_seconds",
        seconds=15.0,
        who="control plane",
        what="a heartbeat of a server or rank; they send one every third of it",
        then="a server is fenced and its jobs recover; a rank's job is closed",
        where="control_plane.settings:CoordinatorSettings.lease_seconds",
        option="control-plane --lease-seconds",
    ),
    Timeout(
        name="renewal_seconds",
        seconds=3.0,
        who="rank, server",
        what="the answer to a renewal of its lease",
        then="the control plane counts as away: it is looked for at its next address",
        where="distca.contract.contact:RENEWAL_SECONDS",
    ),
    Timeout(
        name="broken_stream_seconds",
        seconds=7.0,
        who="control plane",
        what="a rank whose stream of events has broken to be heard again",
        then="it is dead: its job is closed",
        where="control_plane.settings:CoordinatorSettings.broken_stream_seconds",
    ),
    Timeout(
        name="lost_rank_seconds",
        seconds=3.0,
        who="control plane",
        what="the same, if a server's connection to the rank was reset: its process is gone",
        then="the same",
        where="control_plane.settings:CoordinatorSettings.lost_rank_seconds",
    ),
    Timeout(
        name="stall_seconds",
        seconds=10.0,
        who="control plane",
        what="a server that has work to finish some, as its heartbeats tell",
        then="it is fenced and its jobs recover",
        where="control_plane.settings:CoordinatorSettings.stall_seconds",
    ),
    Timeout(
        name="stuck_seconds",
        seconds=60.0,
        who="server",
        what="its own device to finish some of its work",
        then="the process exits, to be started again",
        where="attention_node.server:NodeSettings.stuck_seconds",
    ),
    # Ticks, plans and recoveries.
    Timeout(
        name="tick_timeout_seconds",
        seconds=120.0,
        who="rank",
        what="a tick's reply, whatever the reason",
        then="the server counts as lost: recovery",
        where="trainer_client.options:SessionOptions.tick_timeout_seconds",
        option="train --tick-timeout-seconds",
    ),
    Timeout(
        name="reply_timeout_seconds",
        seconds=120.0,
        who="server",
        what="a rank that takes its reply",
        then="the connection to the rank is closed",
        where="attention_node.server:NodeSettings.reply_timeout_seconds",
    ),
    Timeout(
        name="answer_seconds",
        seconds=30.0,
        who="control plane",
        what="the ranks' answers to a recovery",
        then="the job is closed; the reason names the ranks",
        where="control_plane.settings:CoordinatorSettings.answer_seconds",
    ),
    Timeout(
        name="leave_seconds",
        seconds=5.0,
        who="control plane",
        what="the other ranks to leave too, when one has left before the end of a planned step",
        then="recovery; steps that need its rows fail, with the reason",
        where="control_plane.settings:CoordinatorSettings.leave_seconds",
    ),
    Timeout(
        name="recovery_timeout_seconds",
        seconds=60.0,
        who="rank",
        what="a new plan of a step that lost a server, while the control plane is there",
        then="the step fails",
        where="trainer_client.options:SessionOptions.recovery_timeout_seconds",
        option="train --recovery-timeout-seconds",
    ),
    Timeout(
        name="plan_timeout_seconds",
        seconds=60.0,
        who="rank",
        what="the plan of a step, while the control plane is there",
        then="the step fails; the error names the ranks that are late",
        where="trainer_client.options:SessionOptions.plan_timeout_seconds",
        option="train --plan-timeout-seconds",
    ),
    Timeout(
        name="control_plane_timeout_seconds",
        seconds=300.0,
        who="rank, server",
        what="a control plane that is away",
        then="the rank's job ends; the server exits",
        where="trainer_client.options:SessionOptions.control_plane_timeout_seconds",
        option="train --control-plane-timeout-seconds",
    ),
    Timeout(
        name="collective_timeout_seconds",
        seconds=600.0,
        who="rank",
        what="the other ranks, in a collective of torch.distributed (NCCL's default)",
        then="the training process ends",
        where="trainer_client.options:SessionOptions.collective_timeout_seconds",
        option="init_process_group(timeout=...)",
    ),
    Timeout(
        name="longest_wait_seconds",
        seconds=2.0,
        who="rank, server",
        what="nothing, between two attempts to reach the control plane",
        then="the next attempt",
        where="distca.contract.reconnect:LONGEST_WAIT_SECONDS",
    ),
    Timeout(
        name="rejoin_seconds",
        seconds=2.5,
        who="control plane",
        what="servers to register again, after its own start",
        then="jobs from before recover with those that have",
        where="control_plane.settings:CoordinatorSettings.rejoin_seconds",
    ),
    Timeout(
        name="leader_lease_seconds",
        seconds=10.0,
        who="standby control plane",
        what="the leader to renew its Kubernetes Lease",
        then="it takes over",
        where="control_plane.leadership.kubernetes_lease:LEASE_SECONDS",
    ),
    Timeout(
        name="leader_renew_seconds",
        seconds=7.0,
        who="leading control plane",
        what="its Kubernetes Lease to be renewed",
        then="it gives up leading",
        where="control_plane.leadership.kubernetes_lease:RENEW_SECONDS",
    ),
    Timeout(
        name="lock_lease_seconds",
        seconds=6.0,
        who="standby control plane",
        what="the leader, which is stopped, to touch its lock file (that of a dead one is free at "
        "once)",
        then="it takes over",
        where="control_plane.leadership.leadership:LOCK_LEASE_SECONDS",
    ),
    # Connections.
    Timeout(
        name="start_timeout_seconds",
        seconds=180.0,
        who="rank",
        what="the control plane, at start (it may have to compile its planner first)",
        then="the job does not start",
        where="trainer_client.options:SessionOptions.start_timeout_seconds",
        option="train --start-timeout-seconds",
    ),
    Timeout(
        name="held_timeout_seconds",
        seconds=45.0,
        who="rank, server",
        what="the end of the job or server that has its name, while the control plane cannot tell "
        "whether that one lives: a lease at most, two if the control plane was away",
        then="the process ends with an error that names who has the name",
        where="trainer_client.options:SessionOptions.held_timeout_seconds",
        option="SessionOptions",
    ),
    Timeout(
        name="connect_timeout_seconds",
        seconds=20.0,
        who="rank",
        what="a connection to a server, with its bandwidth probe",
        then="the server counts as lost: recovery",
        where="trainer_client.options:SessionOptions.connect_timeout_seconds",
        option="train --connect-timeout-seconds",
    ),
    Timeout(
        name="handshake_timeout_seconds",
        seconds=5.0,
        who="server",
        what="the hello of a rank that has connected",
        then="the connection is closed",
        where="data_plane.ucxx.settings:UcxxSettings.handshake_timeout_seconds",
    ),
    Timeout(
        name="max_unclaimed_seconds",
        seconds=600.0,
        who="rank, server",
        what="the offer of a message that has come early",
        then="the message is dropped; the connection of an offer that comes still later fails",
        where="data_plane.ucxx.settings:UcxxSettings.max_unclaimed_seconds",
    ),
    Timeout(
        name="connect_seconds",
        seconds=180.0,
        who="server",
        what="the control plane, at start",
        then="the process exits with an error",
        where="attention_node.server:NodeSettings.connect_seconds",
        option="attention-node --connect-seconds",
    ),
    Timeout(
        name="call_seconds",
        seconds=10.0,
        who="rank, server",
        what="the answer to a gRPC call",
        then="the call is made again",
        where="distca.contract.rpc:RpcSettings.call_seconds",
    ),
    Timeout(
        name="keepalive_seconds",
        seconds=30.0,
        who="rank, server",
        what="anything on an idle gRPC connection",
        then="a gRPC ping",
        where="distca.contract.rpc:RpcSettings.keepalive_seconds",
    ),
    Timeout(
        name="keepalive_timeout_seconds",
        seconds=10.0,
        who="rank, server",
        what="the answer to the gRPC ping",
        then="the connection is made anew",
        where="distca.contract.rpc:RpcSettings.keepalive_timeout_seconds",
    ),
    Timeout(
        name="lane_deadline_seconds",
        seconds=86400.0,
        who="server",
        what="a rank's next rows: the model computes, evaluates or saves meanwhile (a rank that is "
        "gone is found by its connection or its lease)",
        then="the connection is closed",
        where="attention_node.tick_server:LANE_DEADLINE_SECONDS",
    ),
    # Ending.
    Timeout(
        name="drain_seconds",
        seconds=30.0,
        who="server",
        what="planned steps to finish, after SIGTERM or a drain",
        then="it leaves: recovery without it",
        where="attention_node.server:NodeSettings.drain_seconds",
        option="attention-node --drain-seconds",
    ),
    Timeout(
        name="stop_seconds",
        seconds=5.0,
        who="control plane",
        what="calls under way, after SIGTERM",
        then="they are cancelled",
        where="control_plane.settings:ControlPlaneSettings.stop_seconds",
    ),
    Timeout(
        name="termination_grace_seconds",
        seconds=60.0,
        who="Kubernetes, Docker",
        what="a container to end, after SIGTERM",
        then="SIGKILL",
        where="",
        option="terminationGracePeriodSeconds (the chart: drainSeconds + 30), stop_grace_period",
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
        shorter=("lease_seconds",),
        longer="held_timeout_seconds",
        why="what is started again would give up before the lease of the process before it ends",
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
    """The timeout of that name.

    Raises:
        KeyError: there is none.
    """
    return _BY_NAME[name]


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
    """The table and the orders, as ``docs/timeouts.md`` shows them."""
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
