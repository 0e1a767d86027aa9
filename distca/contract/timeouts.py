"""Every wait that can run out, in one table: who waits, for what, how long, and what happens then.

The table is ``timeouts.toml``. Defaults are written there alone: settings and constants take theirs
with :func:`default_seconds`. (The data plane stands below this package and holds its own two; a
test compares them.)

``docs/configuration.md`` shows the table. Some of the times must stand in an order, or the wrong
one runs out first and names the wrong culprit; :func:`check_order` holds what a process knows of
them against that order when it starts.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Timeout:
    """A wait that can run out.

    Attributes:
        seconds: by default.
        who: waits.
        what: is awaited.
        then: what happens when it runs out.
        option: how an operator sets it; empty if it is fixed.
    """

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

    shorter: list[str]
    longer: str
    why: str


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

TIMEOUTS = {name: Timeout(**row) for name, row in _TABLE["timeouts"].items()}
"""The waits, by the name of the setting."""

ORDERS = [Order(**row) for row in _TABLE["orders"]]


def default_seconds(name: str) -> float:
    """How long the wait of that name takes by default."""
    return TIMEOUTS[name].seconds


def check_order(known: Mapping[str, float]) -> None:
    """Checks every order of which all timeouts are known.

    Args:
        known: seconds by name; names that are not in the table are a mistake of the caller.

    Raises:
        ValueError: some contradict each other; it names both, their values and what to do.
    """
    for name in known:
        TIMEOUTS[name]
    problems = [
        _problem(order, known)
        for order in ORDERS
        if known.keys() >= {*order.shorter, order.longer}
        and not sum(known[name] for name in order.shorter) < known[order.longer]
    ]
    if problems:
        raise ValueError("; ".join(problems))


def known_timeouts(*settings: object) -> dict[str, float]:
    """The timeouts of the table that ``settings`` have as attributes, by name."""
    return {
        name: float(getattr(each, name))
        for each in settings
        for name in TIMEOUTS
        if hasattr(each, name)
    }


def as_markdown() -> str:
    """The table and the orders, as ``docs/configuration.md`` shows them."""
    rows = (
        (f"`{name}`", f"{each.seconds:g} s", each.who, each.what, each.then, _code(each.option))
        for name, each in TIMEOUTS.items()
    )
    orders = (
        (" + ".join(f"`{name}`" for name in order.shorter), f"`{order.longer}`", order.why)
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
