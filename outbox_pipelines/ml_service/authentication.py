"""Who may call: a bearer token in the call's metadata."""

from __future__ import annotations

import hmac
from collections.abc import Callable

import grpc


class BearerToken(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses calls to one gRPC service that do not carry `authorization: Bearer <token>`.

    Other services (health, reflection) stay open: probes have no secrets. Raises ValueError for a
    token that no caller could send.
    """

    def __init__(self, token: str, service: str) -> None:
        # An empty token is most likely a variable that was never set; it must not open the service.
        if not token or not token.isascii() or not token.isprintable() or token != token.strip():
            raise ValueError("the bearer token must be printable ASCII, neither empty nor padded with spaces")
        self._token = token.encode("ascii")
        self._methods = f"/{service}/"
        self._refuse = grpc.unary_unary_rpc_method_handler(_refuse)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Called by gRPC for every call, before its handler."""
        if handler_call_details.method.startswith(self._methods) and not self._carried_by(handler_call_details):
            return self._refuse
        return continuation(handler_call_details)

    def _carried_by(self, call: grpc.HandlerCallDetails) -> bool:
        for key, value in call.invocation_metadata:
            if key == "authorization":
                scheme, _, given = value.partition(" ")
                # Compared in constant time, so that the answer's delay tells nothing of the token.
                return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), self._token)
        return False


def _refuse(_request: object, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid bearer token is required")
