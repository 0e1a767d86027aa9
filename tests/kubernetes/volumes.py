"""What containers of a pod are given by the kubelet: variables, and volumes as folders."""

from __future__ import annotations

import base64
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.kubernetes.api import Api, Object, pods_path
from tests.kubernetes.network import KUBERNETES_ADDRESS

_FOLDER_MODE = 0o2775
_OPEN_FOLDER_MODE = 0o2777


def field_of(pod: Object, address: str, path: str) -> str:
    """What ``fieldRef`` stands for, such as ``metadata.labels['app']``."""
    if path in ("status.podIP", "status.hostIP"):
        return address
    keyed = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
    if keyed:
        return str(pod["metadata"].get(keyed[1], {}).get(keyed[2], ""))
    found: Any = pod
    for part in path.split("."):
        found = found[part]
    return str(found)


def environment(
    api: Api, pod: Object, container: Object, address: str, services: list[Object]
) -> dict[str, str]:
    """Variables of a container, in the order in which the kubelet lets them win.

    Args:
        services: those of the pod's namespace.
    """
    links = pod["spec"].get("enableServiceLinks", True)
    env = service_variables(services if links else [])
    for source in container.get("envFrom", []):
        env |= {
            f"{source.get('prefix', '')}{key}": value.decode()
            for key, value in _content(api, pod, source, "configMapRef", "secretRef").items()
        }
    for variable in container.get("env", []):
        value = variable.get("value", "")
        given = variable.get("valueFrom", {})
        if "fieldRef" in given:
            value = field_of(pod, address, given["fieldRef"]["fieldPath"])
        elif given:
            (reference,) = given.values()
            found = _content(api, pod, given, "configMapKeyRef", "secretKeyRef")
            value = found[reference["key"]].decode()
        env[variable["name"]] = expanded(value, env)
    return env


def service_variables(services: list[Object]) -> dict[str, str]:
    """What tells of Services: that of the API always, and links to those of the namespace."""
    env = {"KUBERNETES_SERVICE_HOST": KUBERNETES_ADDRESS, "KUBERNETES_SERVICE_PORT": "443"}
    for service in services:
        host = service["spec"].get("clusterIP", "None")
        if host == "None":
            continue
        name = service["metadata"]["name"].upper().replace("-", "_")
        ports = service["spec"]["ports"]
        env[f"{name}_SERVICE_HOST"] = host
        env[f"{name}_SERVICE_PORT"] = str(ports[0]["port"])
        env[f"{name}_PORT"] = f"tcp://{host}:{ports[0]['port']}"
        for port in ports:
            if port.get("name"):
                suffix = port["name"].upper().replace("-", "_")
                env[f"{name}_SERVICE_PORT_{suffix}"] = str(port["port"])
            env[f"{name}_PORT_{port['port']}_TCP"] = f"tcp://{host}:{port['port']}"
    return env


def expanded(text: str, env: Mapping[str, str]) -> str:
    """``$(NAME)`` replaced by what is known."""
    return re.sub(r"\$\(([\w.-]+)\)", lambda match: env.get(match[1], match[0]), text)


def _content(api: Api, pod: Object, source: Object, maps: str, secrets: str) -> dict[str, bytes]:
    """The keys of the ConfigMap or Secret to which ``source`` refers by one of two names."""
    kind, reference = (
        ("configmaps", source[maps]) if maps in source else ("secrets", source[secrets])
    )
    name = reference.get("name", reference.get("secretName"))
    found = api.get(f"/api/v1/namespaces/{pod['metadata']['namespace']}/{kind}/{name}")
    data = found.get("data", {})
    if kind == "secrets":
        return {key: base64.b64decode(value) for key, value in data.items()}
    return {key: value.encode() for key, value in data.items()}


def make_volume(api: Api, pod: Object, address: str, volume: Object, folder: Path) -> Path:
    """The folder that ``volume`` is, made within ``folder`` unless it is the machine's.

    Raises:
        kubernetes.client.ApiException: a Secret or ConfigMap of it is not there.
        NotImplementedError: another kind of volume.
    """
    if "hostPath" in volume:
        return Path(volume["hostPath"]["path"])
    target: Path = folder / volume["name"]
    group = pod["spec"].get("securityContext", {}).get("fsGroup", 0)
    if "emptyDir" in volume:
        target.mkdir(exist_ok=True)
        os.chown(target, 0, group)
        target.chmod(_FOLDER_MODE if group else _OPEN_FOLDER_MODE)
        return target
    if "secret" in volume or "configMap" in volume:
        sources = [volume]
    elif "projected" in volume:
        sources = volume["projected"]["sources"]
    else:
        raise NotImplementedError(f"this kubelet knows no volume like {volume}")
    mode = next(iter(source.get("defaultMode", 0o644) for source in _bodies(volume)))
    files: dict[str, bytes] = {}
    for source in sources:
        files |= _files(api, pod, address, source)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for name, content in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.chown(path, 0, group)
        path.chmod(mode)
    return target


def _bodies(volume: Object) -> list[Object]:
    return [body for key, body in volume.items() if key != "name"]


def _files(api: Api, pod: Object, address: str, source: Object) -> dict[str, bytes]:
    """File names and their content, of one source of a volume."""
    if "serviceAccountToken" in source:
        wanted = source["serviceAccountToken"]
        return {wanted["path"]: _token(api, pod, wanted).encode()}
    if "downwardAPI" in source:
        return {
            item["path"]: field_of(pod, address, item["fieldRef"]["fieldPath"]).encode()
            for item in source["downwardAPI"]["items"]
        }
    content = _content(api, pod, source, "configMap", "secret")
    ((_, body),) = ((key, body) for key, body in source.items() if key != "name")
    if "items" in body:
        return {item["path"]: content[item["key"]] for item in body["items"]}
    return content


def _token(api: Api, pod: Object, wanted: Object) -> str:
    """A token of the pod's service account, which ends with the pod."""
    meta = pod["metadata"]
    reference = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {
            "audiences": [wanted["audience"]] if "audience" in wanted else [],
            "expirationSeconds": wanted.get("expirationSeconds", 3600),
            "boundObjectRef": reference,
        },
    }
    account = pod["spec"].get("serviceAccountName", "default")
    path = f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{account}/token"
    return str(api.create(path, request)["status"]["token"])


def pod_path(pod: Object) -> str:
    """Of a pod in the API."""
    return f"{pods_path(pod['metadata']['namespace'])}/{pod['metadata']['name']}"
