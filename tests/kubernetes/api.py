"""The Kubernetes API in JSON, as the tests and their kubelet use it."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

from kubernetes import client

Object = dict[str, Any]

CALL_SECONDS = 30.0
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


class Api:
    """A client of one user.

    Args:
        url: of the API server.
        authority: path of the certificate that it is checked with.
        token: of the user.
    """

    def __init__(self, url: str, authority: str, token: str) -> None:
        configuration = client.Configuration()
        configuration.host = url
        configuration.ssl_ca_cert = authority
        configuration.retries = False
        self._url = url
        self._client = client.ApiClient(configuration)
        self._headers = {
            "Authorization": f"Bearer {token}",
            "Accept": "application/json",
            "Content-Type": "application/json",
        }

    def call(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> Object:
        """The answer to a request.

        Raises:
            kubernetes.client.ApiException: the API server refuses it.
        """
        response: Any = self._client.call_api(
            method,
            f"{self._url}{path}",
            header_params={**self._headers, "Content-Type": content_type},
            body=body,
            _request_timeout=CALL_SECONDS,
        )
        response.read()
        if not 200 <= response.status <= 299:
            raise client.ApiException(http_resp=response)
        found = json.loads(response.data)
        assert isinstance(found, dict), found
        return found

    def is_ready(self) -> bool:
        """Whether the API server says that it serves all there is."""
        # Its own schema, which helm asks for, comes a little later than the rest.
        paths = ("/readyz", "/openapi/v2")
        answers = [self._client.call_api("GET", self._url + path, self._headers) for path in paths]
        return all(answer.status == 200 for answer in answers)

    def get(self, path: str) -> Object:
        """One object."""
        return self.call("GET", path)

    def find(self, path: str) -> Object | None:
        """One object, or None if there is none."""
        try:
            return self.get(path)
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise

    def items(self, path: str, **selectors: str) -> list[Object]:
        """All objects of a collection."""
        query = f"?{urlencode(selectors)}" if selectors else ""
        return list(self.get(f"{path}{query}")["items"])

    def create(self, path: str, body: Object) -> Object:
        """The object as the API server took it."""
        return self.call("POST", path, body)

    def patch(self, path: str, body: Object, content_type: str = MERGE) -> Object:
        """The object as it is then."""
        return self.call("PATCH", path, body, content_type)

    def delete(self, path: str, body: Object | None = None) -> None:
        """Asks for its end; one that is not there has ended."""
        try:
            self.call("DELETE", path, body)
        except client.ApiException as error:
            if error.status != 404:
                raise


def pods_path(namespace: str) -> str:
    """Of the pods of a namespace."""
    return f"/api/v1/namespaces/{namespace}/pods"
