"""The Kubernetes API as the control plane uses it from inside a pod: JSON over HTTPS.

Its client library is a quarter of an image of the control plane, for three kinds of calls.
"""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

from distca.contract.timeouts import default_seconds

Object = dict[str, Any]

CALL_SECONDS: Final = default_seconds("kubernetes_call_seconds")
"""Deadline of a call to the API."""

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder of a pod's service account token, and the authority of the API server."""

NOT_FOUND: Final = 404
CONFLICT: Final = 409

_MAX_ERROR_CHARACTERS = 300


class KubernetesError(Exception):
    """The API server refuses a call.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status


class KubernetesApi:
    """Calls of one account. Safe to use from several threads.

    Args:
        url: of the API server, such as ``https://10.96.0.1:443``.
        account: folder with ``token`` and ``ca.crt``; None sends no token and trusts whom the
            machine trusts. Both are read at every call, as the kubelet renews them.
    """

    def __init__(self, url: str, account: Path | None = None) -> None:
        self._url = url.rstrip("/")
        self._account = account

    def get(self, path: str) -> Object:
        """The object at ``path``.

        Raises:
            KubernetesError: the API server refuses the call.
            OSError: it cannot be reached, or does not answer in time.
        """
        return self._call("GET", path)

    def create(self, path: str, body: Object) -> Object:
        """Makes an object in the collection at ``path``. Raises like :meth:`get`."""
        return self._call("POST", path, body)

    def replace(self, path: str, body: Object) -> Object:
        """Writes an object that was read; a conflict if it has changed. Raises like :meth:`get`."""
        return self._call("PUT", path, body)

    def patch(self, path: str, body: Object) -> Object:
        """Merges ``body`` into an object; None removes a field. Raises like :meth:`get`."""
        return self._call("PATCH", path, body, "application/merge-patch+json")

    def _call(
        self, method: str, path: str, body: Object | None = None, kind: str = "application/json"
    ) -> Object:
        headers = {"Accept": "application/json", "Content-Type": kind}
        context = None
        if self._account is not None:
            headers["Authorization"] = f"Bearer {(self._account / 'token').read_text().strip()}"
            context = ssl.create_default_context(cafile=self._account / "ca.crt")
            # Python 3.13 asks for key identifiers, which authorities of older clusters lack.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        request = urllib.request.Request(
            self._url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers=headers,
            method=method,
        )
        opener = urllib.request.build_opener(
            # The API server is in the cluster: no proxy of the environment leads there.
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=context),
        )
        try:
            with opener.open(request, timeout=CALL_SECONDS) as response:
                found = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise KubernetesError(error.code, _message(error)) from None
        if not isinstance(found, dict):
            raise KubernetesError(502, f"{method} {path} was answered by {type(found).__name__}")
        return found


def cluster_api(account: Path = ACCOUNT) -> KubernetesApi:
    """The API of the cluster that this pod runs in.

    Args:
        account: see :class:`KubernetesApi`.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "")
    lacks = [
        *(["KUBERNETES_SERVICE_HOST and _PORT in its environment"] if not (host and port) else []),
        *(str(account / name) for name in ("token", "ca.crt") if not (account / name).is_file()),
    ]
    if lacks:
        raise OSError(
            f"no access to the Kubernetes API without {', '.join(lacks)}: run in a pod with a "
            "mounted service account token that may get, create and update leases"
        )
    return KubernetesApi(f"https://{f'[{host}]' if ':' in host else host}:{port}", account)


def in_one_line(error: Exception) -> str:
    """An error of a call for the log."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:_MAX_ERROR_CHARACTERS]


def _message(error: urllib.error.HTTPError) -> str:
    """The API server's words on a refusal: its ``Status``, or its body."""
    text = error.read(1 << 16).decode(errors="replace")
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text or error.reason
