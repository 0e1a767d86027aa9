"""What the cluster's network does for Services: a small kube-proxy, which listens on their
addresses and hands connections on to pods that are ready; and their names, as DNS has them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import threading
from dataclasses import dataclass, field

from tests.kubernetes.api import Api, Object
from tests.kubernetes.network import add_address, remove_address

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.3
JOIN_SECONDS = 30.0

Port = tuple[str, int]
"""Address and port."""


@dataclass
class ServiceProxy:
    """Forwards connections to Services, from the start to :meth:`close`.

    Args:
        api: of the user ``system:kube-proxy``.
    """

    api: Api
    _names: dict[str, str] = field(default_factory=dict)
    _backends: dict[Port, list[Port]] = field(default_factory=dict)
    _servers: dict[Port, asyncio.Server] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begins."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="services")
        self._thread.start()

    def close(self) -> None:
        """Ends all connections."""
        self._over.set()
        self._thread.join(JOIN_SECONDS)

    def names(self, namespace: str) -> str:
        """Lines of /etc/hosts for the Services there, and for pods of headless ones."""
        return self._names.get(namespace, "")

    async def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._backends = await asyncio.to_thread(self._look)
                await self._listen()
            except Exception:
                # Whatever the client raises: the next look may succeed.
                logger.exception("Services")
            await asyncio.sleep(POLL_SECONDS)
        for server in self._servers.values():
            server.close()

    def _look(self) -> dict[Port, list[Port]]:
        """Which pods serve each port of a Service."""
        slices: dict[tuple[str, str], list[Object]] = {}
        for each in self.api.items("/apis/discovery.k8s.io/v1/endpointslices"):
            meta = each["metadata"]
            name = meta.get("labels", {}).get("kubernetes.io/service-name", "")
            slices.setdefault((meta["namespace"], name), []).append(each)
        backends = {}
        names: dict[str, str] = {}
        for service in self.api.items("/api/v1/services"):
            address = service["spec"].get("clusterIP", "None")
            space, name = service["metadata"]["namespace"], service["metadata"]["name"]
            found = slices.get((space, name), [])
            if address == "None":
                names[space] = names.get(space, "") + _lines_of_pods(found, name, space)
                continue
            names[space] = names.get(space, "") + f"{address} {_spellings(name, space)}\n"
            for port in service["spec"]["ports"]:
                backends[address, port["port"]] = _ready(found, port.get("name"))
        self._names = names
        return backends

    async def _listen(self) -> None:
        """On the ports of Services that are there, and no longer on others."""
        for port in self._backends.keys() - self._servers.keys():
            add_address(port[0])
            self._servers[port] = await asyncio.start_server(
                functools.partial(self._forward, port), *port
            )
        for port in self._servers.keys() - self._backends.keys():
            self._servers.pop(port).close()
            if all(port[0] != address for address, _ in self._servers):
                remove_address(port[0])

    async def _forward(
        self, port: Port, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        backends = self._backends.get(port)
        if not backends:
            # As kube-proxy rejects what has no endpoints.
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection(*random.choice(backends))
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_copy(reader, back), _copy(there, writer))


def _spellings(name: str, namespace: str) -> str:
    return f"{name} {name}.{namespace} {name}.{namespace}.svc {name}.{namespace}.svc.cluster.local"


def _lines_of_pods(slices: list[Object], service: str, namespace: str) -> str:
    """Of a headless Service: of its pods that are ready, and have a host name."""
    return "".join(
        f"{endpoint['addresses'][0]} "
        f"{_spellings(endpoint['hostname'] + '.' + service, namespace)}\n"
        for each in slices
        for endpoint in each.get("endpoints") or []
        if endpoint.get("hostname")
    )


def _ready(slices: list[Object], name: str | None) -> list[Port]:
    return [
        (endpoint["addresses"][0], port["port"])
        for each in slices
        for port in each.get("ports") or []
        if (port.get("name") or None) == name
        for endpoint in each.get("endpoints") or []
        if endpoint.get("conditions", {}).get("ready", True)
    ]


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
