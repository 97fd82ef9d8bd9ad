"""A real gRPC server whose answers a test decides."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outbox_pipelines.ml_service import training_pb2, training_pb2_grpc

Answer = Callable[[training_pb2.TrainBatchRequest, grpc.ServicerContext], training_pb2.TrainBatchResponse]


def accept(request: training_pb2.TrainBatchRequest, _context: grpc.ServicerContext) -> training_pb2.TrainBatchResponse:
    """Accept every row."""
    return training_pb2.TrainBatchResponse(accepted=[example.id for example in request.examples])


def refuse(bad: Iterable[int], *, with_ids: bool = False) -> Answer:
    """A service that refuses these ids: whole batches, or saying which."""
    refused = set(bad)

    def answer(
        request: training_pb2.TrainBatchRequest, context: grpc.ServicerContext
    ) -> training_pb2.TrainBatchResponse:
        found = [example.id for example in request.examples if example.id in refused]
        if found and not with_ids:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "some row is bad")
        response = accept(request, context)
        for row_id in found:
            response.accepted.remove(row_id)
            response.rejected.add(id=row_id, reason="no label")
        return response

    return answer


class ScriptedService(training_pb2_grpc.TrainingServicer):
    """Records every call; answers as ``answer`` says. Use it as a context manager."""

    def __init__(self, port: int = 0, *, max_message_bytes: int = 4 * 1024 * 1024) -> None:
        self.answer: Answer = accept
        self._port = port
        self._max_message_bytes = max_message_bytes
        self._lock = threading.Lock()
        self._calls: list[tuple[str, list[int]]] = []
        self.health = health.HealthServicer()

    @property
    def target(self) -> str:
        """Its address."""
        return f"127.0.0.1:{self._port}"

    @property
    def calls(self) -> list[tuple[str, list[int]]]:
        """Tenant and ids of every call so far, in the order of arrival."""
        with self._lock:
            return list(self._calls)

    def ids(self, tenant: object = None) -> list[int]:
        """Every id that arrived, in order, repeats included; of one tenant or of all."""
        return [row_id for name, ids in self.calls for row_id in ids if tenant is None or name == str(tenant)]

    def TrainBatch(  # noqa: N802  # gRPC's name
        self, request: training_pb2.TrainBatchRequest, context: grpc.ServicerContext
    ) -> training_pb2.TrainBatchResponse:
        """Record the call and answer."""
        with self._lock:
            self._calls.append((request.tenant, [example.id for example in request.examples]))
        return self.answer(request, context)

    def start(self) -> None:
        """Begin to listen, on the same port as before if there was one."""
        self._server = grpc.server(
            ThreadPoolExecutor(32),
            options=[("grpc.max_receive_message_length", self._max_message_bytes), ("grpc.so_reuseport", 0)],
        )
        training_pb2_grpc.add_TrainingServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self._port = self._server.add_insecure_port(self.target)
        self._server.start()
        self.health.set("", health_pb2.HealthCheckResponse.SERVING)

    def stop(self) -> None:
        """Stop listening; calls in progress are cut off."""
        self._server.stop(0).wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.stop()
