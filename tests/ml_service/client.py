"""A caller of the service, as the training outbox is one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outbox_pipelines.ml_service.training_pb2 import (
    Example,
    PredictRequest,
    PredictResponse,
    TrainBatchRequest,
    TrainBatchResponse,
)
from outbox_pipelines.ml_service.training_pb2_grpc import TrainingStub

from .rows import QUESTIONS, TENANT

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

#: No call of a test takes this long unless something hangs, in seconds.
DEADLINE = 30


class Client:
    """Calls one server over localhost."""

    def __init__(
        self,
        port: int,
        *,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        address = f"127.0.0.1:{port}"
        self._channel = (
            grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)
        )
        self._training = TrainingStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    def train(self, examples: Iterable[Example], tenant: str = TENANT) -> TrainBatchResponse:
        answer: TrainBatchResponse = self._training.TrainBatch(
            TrainBatchRequest(tenant=tenant, batch_key="batch", examples=examples),
            metadata=self._metadata,
            timeout=DEADLINE,
        )
        return answer

    def predict(self, features: Sequence[str] = QUESTIONS, tenant: str = TENANT) -> PredictResponse:
        answer: PredictResponse = self._training.Predict(
            PredictRequest(tenant=tenant, features=features), metadata=self._metadata, timeout=DEADLINE
        )
        return answer

    def health(self, service: str = "") -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return int(self._health.Check(request, timeout=DEADLINE).status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()


def refused(error: Any) -> tuple[grpc.StatusCode, str]:
    """Status and details of a failed call."""
    return error.value.code(), error.value.details()
