"""The Kubernetes API as the control plane uses it from inside a pod."""

from __future__ import annotations

from typing import Any, Final

from distca.contract.timeouts import default_seconds

CALL_SECONDS: Final = default_seconds("kubernetes_call_seconds")
"""Deadline of a call to the API."""

_MAX_ERROR_CHARACTERS = 300


def cluster_apis() -> tuple[Any, Any]:
    """``CoordinationV1Api`` and ``CoreV1Api`` of the cluster that this pod runs in.

    Raises:
        ModuleNotFoundError: the package ``kubernetes`` is not installed.
        OSError: this is no pod, or it has no service account token.
    """
    try:
        from kubernetes import client, config
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a Kubernetes Lease needs the package kubernetes: pip install 'distca[kubernetes]'"
        ) from error
    try:
        config.load_incluster_config()  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        raise OSError(
            f"this process cannot reach the Kubernetes API: {error}; it must run in a pod whose "
            "service account token is mounted and may get, create and update leases"
        ) from error
    return client.CoordinationV1Api(), client.CoreV1Api()


def in_one_line(error: Exception) -> str:
    """An error of the API for the log: the client puts headers and body into its message."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:_MAX_ERROR_CHARACTERS]
