"""nixl agents, and the memory that they have registered.

Memory is registered once, when a buffer of it is first offered or put, and again only if its pool
has let go of it. Peers are sent the registration's metadata and keep it for good: nixl has no way
to take it back, and refuses or, worse, mixes up other metadata for the same addresses. So when
memory that a peer may know comes back as another slab, a new agent takes over, under a new name.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from data_plane.nixl.settings import LIBFABRIC, LIBFABRIC_NEEDS, NixlSettings
from data_plane.process_sockets import listening_ports
from data_plane.transport_facts import INSTALL_NIXL, NIXL_PACKAGES

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

HOST: Final = -1
"""A number in place of a GPU's index."""

_ENVIRONMENT_LOCK = threading.Lock()


def import_nixl() -> Any:
    """The library, for whichever version of CUDA it is installed."""
    # It writes to stdout, and reads this when it is loaded.
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    for name in NIXL_PACKAGES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise ImportError(f"the nixl transport needs the nixl library: {INSTALL_NIXL}")


def nixl_errors(library: Any) -> tuple[type[Exception], ...]:
    """The exceptions of its calls: classes with no base of their own, and RuntimeError."""
    classes = [
        value
        for value in vars(_bindings(library)).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    return (*classes, RuntimeError)


def _bindings(library: Any) -> Any:
    return importlib.import_module(f"{library.__name__}._bindings")


@dataclass(frozen=True, eq=False)
class RegisteredSlab:
    """A registered slab.

    Attributes:
        agent: with which it is registered.
        begin, end: its half-open range of addresses.
        metadata: what a peer needs to write to it; includes how to reach the agent.
        handle: of the registration.
        storage: keeps the memory alive until it is no longer registered.
    """

    agent: NixlAgent
    begin: int
    end: int
    metadata: bytes
    handle: Any
    storage: object


class NixlAgent:
    """One agent of the library. For the owner thread, but for its creation.

    Args:
        settings: back end, devices and UCX options.

    Attributes:
        ports: TCP ports that its back end has opened; another thread of the process may have opened
            one of them meanwhile.
        arrived: notices of peers' writes that are complete here.
    """

    def __init__(self, settings: NixlSettings) -> None:
        library = import_nixl()
        self.errors = nixl_errors(library)
        self._backends = [settings.backend]
        # Agents over libfabric greet each other, whatever the owner threads wait for.
        drives_itself = settings.backend == LIBFABRIC
        config = library.nixl_agent_config(enable_prog_thread=drives_itself, backends=[])
        before = listening_ports()
        # Unique: peers tell agents apart by name.
        self._agent = library.nixl_agent(f"distca-{uuid.uuid4().hex}", config)
        options = settings.context_options()
        with _in_environment(options):
            try:
                own = {} if drives_itself else {"ucx_error_handling_mode": "peer"}
                self._agent.create_backend(settings.backend, own)
            except self.errors as error:
                needs = LIBFABRIC_NEEDS if drives_itself else f"with UCX options {options}"
                raise RuntimeError(
                    f"nixl did not start {settings.backend}: {error}; {needs}"
                ) from error
        self.ports = listening_ports() - before
        self.arrived: set[bytes] = set()
        self._remote_names: dict[bytes, str] = {}
        self._retired: list[tuple[int, int]] = []

    def register(self, slab: torch.Tensor) -> RegisteredSlab:
        """Registers a slab, 1-D uint8."""
        begin, nbytes = slab.data_ptr(), slab.numel()
        handle = self._agent.register_memory(
            [(begin, nbytes, slab.device.index or 0, "")],
            _memory_kind(slab.is_cuda),
            self._backends,
        )
        metadata = self._agent.get_partial_agent_metadata(handle, True, self._backends)
        logger.debug("registered %d bytes", nbytes)
        return RegisteredSlab(
            self, begin, begin + nbytes, metadata, handle, storage=slab.untyped_storage()
        )

    def retire(self, region: RegisteredSlab) -> None:
        """Deregisters a slab that its pool has let go of."""
        self._retired.append((region.begin, region.end))
        try:
            self._agent.deregister_memory(region.handle, self._backends)
        except self.errors as error:
            logger.warning("nixl did not deregister %d bytes: %s", region.end - region.begin, error)

    def knows_otherwise(self, slab: torch.Tensor) -> bool:
        """Returns whether peers may have metadata of other slabs for some of its addresses."""
        begin = slab.data_ptr()
        end = begin + slab.numel()
        return any(first < end and begin < last for first, last in self._retired)

    @property
    def introduction(self) -> bytes:
        """The metadata by which another agent can :meth:`meet` this one."""
        no_memory = _bindings(import_nixl()).nixlRegDList(self._agent.nixl_mems["DRAM"])
        return bytes(self._agent.get_partial_agent_metadata(no_memory, True, self._backends))

    def meet(self, metadata: bytes) -> str:
        """Loads a peer's metadata, unless it has been before; returns its name."""
        name = self._remote_names.get(metadata)
        if name is None:
            loaded = self._agent.add_remote_agent(metadata)
            name = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
            self._remote_names[metadata] = name
        return name

    def write(
        self,
        source: torch.Tensor,
        metadata: bytes,
        address: int,
        device_index: int,
        notice: bytes = b"",
    ) -> NixlWrite:
        """Prepares a write of ``source``, in registered memory, to a peer's registered memory.

        Args:
            source: 1-D uint8.
            metadata: of the peer's region.
            address: where the bytes go.
            device_index: of the GPU that the address belongs to, or HOST.
            notice: comes to the peer's ``arrived`` behind the bytes.
        """
        name = self.meet(metadata)
        nbytes = source.numel()
        local = [(source.data_ptr(), nbytes, source.device.index or 0)]
        remote = [(address, nbytes, max(device_index, 0))]
        handle = self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(local, _memory_kind(source.is_cuda)),
            self._agent.get_xfer_descs(remote, _memory_kind(device_index != HOST)),
            name,
            notice,
            self._backends,
        )
        return NixlWrite(self._agent, handle)

    def forget_dead(self, metadata: bytes) -> None:
        """Drops the endpoint to a process that has ended, by any of its metadata."""
        name = self._remote_names.get(metadata)
        if name is None:
            return
        known = self._remote_names.items()
        self._remote_names = {key: value for key, value in known if value != name}
        try:
            self._agent.remove_remote_agent(name)
        except self.errors as error:
            logger.debug("nixl did not forget a peer that has ended: %s", error)

    def progress(self) -> None:
        """Lets peers' writes to this process go on, where the network needs its help."""
        for notices in self._agent.get_new_notifs(self._backends).values():
            self.arrived.update(notices)


class NixlWrite:
    """A write. The memory behind it may be read until ``done`` is True or has raised."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent = agent
        self._handle = handle
        self._posted = False

    def done(self) -> bool:
        """Starts it if it is not started, and returns whether it is over.

        Raises:
            Exception: one of ``NixlAgent.errors``: it has failed, and is over.
        """
        if self._posted:
            state = self._agent.check_xfer_state(self._handle)
        else:
            self._posted = True
            state = self._agent.transfer(self._handle)
        if state == "ERR":
            raise RuntimeError("nixl reports that the write failed")
        return bool(state == "DONE")


class NixlMemory:
    """Registers slabs with the agent in force. For the owner thread.

    Args:
        settings: of the agents.
        run_soon: runs something on the owner thread; callable from any thread.

    Attributes:
        agent: the one in force.
    """

    def __init__(self, settings: NixlSettings, run_soon: Callable[[Callable[[], None]], None]):
        self._settings = settings
        self._run_soon = run_soon
        self.agent = NixlAgent(settings)
        self._ports = self.agent.ports
        self._on_ports: Callable[[frozenset[int]], None] = lambda ports: None
        self._registered: dict[int, _Registered] = {}

    def region(self, slab: torch.Tensor) -> RegisteredSlab:
        """The registration of ``slab``, made now if there is none.

        Raises:
            Exception: one of the agent's ``errors``.
        """
        key, address = id(slab), slab.data_ptr()
        registered = self._registered.get(key)
        # Another slab may have the id of one that died a moment ago.
        if registered is not None and registered.region.begin == address:
            if registered.region.agent is self.agent:
                return registered.region
            registered.region = self._register(slab)
            return registered.region
        registered = self._registered[key] = _Registered(self._register(slab))
        # The slab dies when its pool lets go of it, on whatever thread.
        died = partial(self._run_soon, partial(self._forget, key, registered))
        weakref.finalize(slab, died).atexit = False
        return registered.region

    def tell_ports(self, on_ports: Callable[[frozenset[int]], None]) -> None:
        """Calls ``on_ports``, now and whenever there are more, with the ports of all agents."""
        self._on_ports = on_ports
        on_ports(self._ports)

    def _register(self, slab: torch.Tensor) -> RegisteredSlab:
        if self.agent.knows_otherwise(slab):
            logger.info("memory was given back and comes again: a new nixl agent takes over")
            self.agent = NixlAgent(self._settings)
            self._ports |= self.agent.ports
            self._on_ports(self._ports)
        return self.agent.register(slab)

    def _forget(self, key: int, registered: _Registered) -> None:
        if self._registered.get(key) is registered:
            del self._registered[key]
        registered.region.agent.retire(registered.region)


@dataclass(eq=False)
class _Registered:
    """A slab's registration with the agent that was in force when it was last used."""

    region: RegisteredSlab


def _memory_kind(on_gpu: bool) -> str:
    return "VRAM" if on_gpu else "DRAM"


@contextmanager
def _in_environment(options: dict[str, str]) -> Iterator[None]:
    """nixl takes options of its UCX from nowhere else."""
    names = {f"UCX_{name}": value for name, value in options.items()}
    with _ENVIRONMENT_LOCK:
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
