"""Collectives on a GPU are launched only once all their ranks have come to them on the host.

A collective's kernel occupies a GPU until the last rank has launched its own. Meanwhile CUDA loads
no kernel on that GPU and frees no memory, and a call that does either holds a lock that every other
call of the process needs. If the awaited rank waits in its turn for rows from this process's
server, nobody goes on.

So the ranks of every collective meet on the host first, whatever calls it: DDP, FSDP2, a metric, an
optimizer. A kernel that runs is then one that all its ranks are about to launch: no GPU waits for
another rank for long, and a call that waits for the GPU ends, whatever the training loop does.

Every collective of ``torch.distributed`` passes PyTorch's dispatcher as an operator of ``c10d``.
The kernels here sit at its key ``BackendSelect``, in front of those that launch. Point-to-point
messages do not meet: two ranks may send to each other first and receive then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from trainer_client.errors import SessionError

logger = logging.getLogger(__name__)

_POINT_TO_POINT = frozenset({"send", "recv_", "recv_any_source_"})
_KEY = "BackendSelect"
_PAUSE_SECONDS = 0.01
_LOOK = timedelta(seconds=1)
"""How often a wait looks whether the job has ended."""


class HostMeetings:
    """Has the ranks of each collective meet on the host before it, from :meth:`open` to
    :meth:`close`, which all ranks come to at the same place among their collectives.

    Args:
        job_id: of a job whose ranks are those of ``torch.distributed``.
        n_ranks: of the job. If ``torch.distributed`` has others, collectives do not meet, since
            the others would not come.
        check: raises what ended the job, if something did.
        timeout_seconds: how long a rank waits for the others.
        device_type: of the collectives' tensors.
    """

    def __init__(
        self,
        job_id: str,
        n_ranks: int,
        check: Callable[[], None],
        timeout_seconds: float,
        device_type: str = "cuda",
    ) -> None:
        self._job_id, self._n_ranks = job_id, n_ranks
        self._check = check
        self._timeout = timedelta(seconds=timeout_seconds)
        self._device_type = device_type
        self._making: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._groups: dict[str, Any] = {}
        self._has_said = False

    def open(self) -> None:
        """Collectives meet from now on."""
        _Dispatcher.add(self)

    def close(self) -> None:
        """Collectives are launched as before. Idempotent."""
        _Dispatcher.remove(self)

    def before(self, name: str, group: dist.ProcessGroup, tensors: Any) -> None:
        """Returns when all ranks of ``group`` have come to the collective ``name``.

        Args:
            name: for errors.
            group: whose collective it is.
            tensors: arguments of the collective; those on another device do not meet.
        """
        if group.size() < 2 or _device_type(tensors) != self._device_type:
            return
        if dist.get_world_size() != self._n_ranks:
            self._say_once(
                "torch.distributed has %d ranks and job %s %d: collectives between them may hold "
                "up servers; make a job of all ranks",
                dist.get_world_size(),
                self._job_id,
                self._n_ranks,
            )
            return
        options = dist.BarrierOptions()
        options.device = torch.device("cpu")
        try:
            work = self._on_host(group).barrier(options)
            while not work.is_completed():
                self._check()
                with suppress(RuntimeError):
                    work.wait(_LOOK)
            work.wait()
        except RuntimeError as error:
            self._check()
            ranks = dist.get_process_group_ranks(group)
            raise SessionError(
                f"{name}: not all of ranks {ranks} came to it; a missing rank's log says why"
            ) from error

    def _say_once(self, text: str, *values: object) -> None:
        if not self._has_said:
            self._has_said = True
            logger.warning(text, *values)

    def _on_host(self, group: dist.ProcessGroup) -> Any:
        """The twin of ``group`` on the host. Made at the group's first collective, when all its
        ranks have come; registered nowhere, so that it changes the names of no other group."""
        name = group.group_name
        # Threads may come to several groups at a time, and their ranks in different orders.
        with self._making[name]:
            if name not in self._groups:
                store = PrefixStore(f"distca/{self._job_id}/{name}", _get_default_store())
                self._await_all(store, group.size())
                self._groups[name] = dist.ProcessGroupGloo(
                    store, group.rank(), group.size(), self._timeout
                )
            return self._groups[name]

    def _await_all(self, store: Store, n_ranks: int) -> None:
        deadline = time.monotonic() + self._timeout.total_seconds()
        there = store.add("there", 1)
        while there < n_ranks:
            self._check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{there} of {n_ranks} ranks have come")
            time.sleep(_PAUSE_SECONDS)
            there = store.add("there", 0)


class _Dispatcher:
    """The kernels in front of c10d's operators, for as long as somebody's collectives meet."""

    _meetings: tuple[HostMeetings, ...] = ()
    _library: torch.library.Library | None = None
    _lock = threading.Lock()

    @classmethod
    def add(cls, meetings: HostMeetings) -> None:
        with cls._lock:
            cls._meetings = (*cls._meetings, meetings)
            if cls._library is None:
                cls._library = torch.library.Library("c10d", "IMPL")
                for name, place in _collectives().items():
                    cls._library.impl(name, cls._kernel(name, place), _KEY, with_keyset=True)

    @classmethod
    def remove(cls, meetings: HostMeetings) -> None:
        with cls._lock:
            cls._meetings = tuple(each for each in cls._meetings if each is not meetings)
            if not cls._meetings and cls._library is not None:
                cls._library._destroy()
                cls._library = None

    @classmethod
    def _kernel(cls, name: str, place: int) -> Callable[..., Any]:
        operator = getattr(torch.ops.c10d, name).default
        behind = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def meet_and_launch(keys: Any, *arguments: Any, **named: Any) -> Any:
            meetings = cls._meetings
            if meetings:
                group = dist.ProcessGroup.unbox(arguments[place])
                # One is enough, however many sessions a process has.
                meetings[0].before(name, group, arguments)
            return operator.redispatch(keys & behind, *arguments, **named)

        return meet_and_launch


def _collectives() -> dict[str, int]:
    """c10d's operators that launch a collective, and which argument of each is the group."""
    found = {}
    for full_name in torch._C._dispatch_get_all_op_names():
        space, _, name = full_name.partition("::")
        if space != "c10d" or name in _POINT_TO_POINT:
            continue
        arguments = getattr(torch.ops.c10d, name).default._schema.arguments
        for place, argument in enumerate(arguments):
            if "ProcessGroup" in str(argument.type):
                found[name] = place
    return found


def _device_type(arguments: Any) -> str | None:
    """The device type of the first tensor among arguments and lists of them."""
    if isinstance(arguments, torch.Tensor):
        return arguments.device.type
    if isinstance(arguments, list | tuple):
        return next(filter(None, map(_device_type, arguments)), None)
    return None
