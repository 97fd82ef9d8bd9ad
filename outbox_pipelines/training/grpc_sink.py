"""Batches to the ML service over gRPC."""

import ipaddress
import re
import threading
from collections.abc import Sequence
from types import MappingProxyType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outbox_pipelines import tracing
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.ml_service import training_pb2, training_pb2_grpc
from outbox_pipelines.settings import InvalidSettings, Settings
from outbox_pipelines.training.sink import (
    Batch,
    BatchRefused,
    Health,
    Misconfigured,
    OutboxRow,
    ServiceUnwell,
    SinkClosed,
    Verdict,
)

_PROBE_SECONDS = 2.0
_ENVELOPE_BYTES = 72
"""The tenant's id and the batch key in each message: 36 and 32 characters, a tag and a length each."""

_ROW_BYTES = 32
"""More than a row takes besides its text: three tags, two lengths of up to 5 bytes, an id of up to 10."""

_SIZE_LIMIT = re.compile(r"message larger than max \(\d+ vs\. \d+\)")

_SERVICE = training_pb2.DESCRIPTOR.services_by_name["Training"].full_name
_CALL = f"{_SERVICE}/TrainBatch"
_CALLED = MappingProxyType({"rpc.system": "grpc", "rpc.service": _SERVICE, "rpc.method": "TrainBatch"})

_MISCONFIGURED = MappingProxyType(
    {
        grpc.StatusCode.UNAUTHENTICATED: "check OUTBOX_ML_TOKEN and the client certificate",
        grpc.StatusCode.PERMISSION_DENIED: "check what the service allows this client",
        grpc.StatusCode.UNIMPLEMENTED: "check that OUTBOX_ML_TARGET is a service with TrainBatch",
    }
)


class GrpcSink:
    """Calls ``TrainBatch``; see ``ml_service/training.proto`` for the contract."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._channel = _open_channel(settings)
        self._train = training_pb2_grpc.TrainingStub(self._channel).TrainBatch  # type: ignore[no-untyped-call]  # generated
        self._health = health_pb2_grpc.HealthStub(self._channel).Check
        token = settings.ml_token
        self._metadata = (("authorization", f"Bearer {token.get_secret_value()}"),) if token else ()
        self._closed = threading.Event()

    @property
    def target(self) -> str:
        """The service's address."""
        return f"ml-service {self._settings.ml_target}"

    @property
    def max_call_bytes(self) -> int:
        """The service's message limit."""
        return self._settings.ml_max_message_bytes

    def call_bytes(self, rows: Sequence[OutboxRow]) -> int:
        """An upper bound, or near the limit the message's ``ByteSize()``."""
        # UTF-8 takes at most 4 bytes for a character; counting characters costs next to nothing.
        bound = 4 * sum(len(row.example) for row in rows) + _ROW_BYTES * len(rows) + _ENVELOPE_BYTES
        if bound <= self.max_call_bytes:
            return bound
        return int(_message(rows).ByteSize()) + _ENVELOPE_BYTES

    def send(self, batch: Batch) -> Verdict:
        """Call ``TrainBatch`` and read its answer; see :class:`~outbox_pipelines.training.sink.Sink`."""
        request = _message(batch.rows)
        request.tenant = str(batch.tenant_id)
        request.batch_key = batch.key
        with tracing.span(_CALL, tracing.Kind.CLIENT, _CALLED) as span:
            span.set("outbox.rows", len(batch.rows))
            try:
                response = self._train(
                    request, timeout=self._settings.ml_deadline_seconds, metadata=(*self._metadata, *span.headers())
                )
            except grpc.RpcError as error:
                span.set("rpc.grpc.status_code", error.code().value[0])
                span.fail(error.code().name)
                raise self._explain(error) from None
            except ValueError:
                # grpc's word for a call on a closed channel.
                raise SinkClosed(f"{self.target}: the call was cancelled") from None
            span.set("rpc.grpc.status_code", grpc.StatusCode.OK.value[0])
            return self._read(batch, response)

    def _read(self, batch: Batch, response: training_pb2.TrainBatchResponse) -> Verdict:
        rejected = {rejection.id: rejection.reason or "rejected without a reason" for rejection in response.rejected}
        foreign = rejected.keys() - set(batch.row_ids)
        if foreign:
            raise ServiceUnwell(f"{self.target} answered for rows that were not sent ({len(foreign)} ids)")
        if response.accepted:
            missing = set(batch.row_ids) - set(response.accepted) - rejected.keys()
            if missing:
                raise ServiceUnwell(
                    f"{self.target} left {len(missing)} of {len(batch.rows)} rows of a batch without an answer"
                )
        return Verdict(rejected)

    def _explain(self, error: grpc.RpcError) -> OutboxError:
        code: grpc.StatusCode = error.code()
        details = error.details() or ""
        told = f"{self.target} answered {code.name}"
        if self._closed.is_set():
            return SinkClosed(f"{self.target}: the call was cancelled")
        if code is grpc.StatusCode.INVALID_ARGUMENT or _is_too_large(code, details):
            return BatchRefused(told, details)
        if code in _MISCONFIGURED:
            return Misconfigured(f"{told} ({_MISCONFIGURED[code]})", details)
        return ServiceUnwell(told, details)

    def probe(self) -> Health:
        """Ask the standard health service; a service without one counts as reachable."""
        try:
            answer = self._health(
                health_pb2.HealthCheckRequest(),
                timeout=min(_PROBE_SECONDS, self._settings.ml_deadline_seconds),
                metadata=self._metadata,
            )
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            # Any other status was given by a service that is there; a delivery will tell more.
            away = code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
            return Health(not away, f"{code.name}: {error.details() or 'no details'}")
        except ValueError:
            return Health(reachable=False, detail="the sink is closed")
        serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        return Health(serving, health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    def close(self) -> None:
        """Close the channel, which cancels every call on it."""
        self._closed.set()
        self._channel.close()


def _message(rows: Sequence[OutboxRow]) -> training_pb2.TrainBatchRequest:
    return training_pb2.TrainBatchRequest(
        examples=[training_pb2.Example(id=row.row_id, json=row.example) for row in rows]
    )


def _is_too_large(code: grpc.StatusCode, details: str) -> bool:
    # The same status says that a quota is used up; gRPC marks its own size limit by this text only.
    return code is grpc.StatusCode.RESOURCE_EXHAUSTED and _SIZE_LIMIT.search(details) is not None


def _open_channel(settings: Settings) -> grpc.Channel:
    milliseconds = int(settings.ml_keepalive_seconds * 1000)
    options = [
        ("grpc.max_send_message_length", settings.ml_max_message_bytes),
        # An answer that is refused for its size would look like a batch that was: none is.
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", milliseconds),
        ("grpc.keepalive_timeout_ms", min(milliseconds, 20_000)),
        # Channels of one process share connections otherwise, and a closed one could linger.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if not settings.uses_tls:
        if settings.ml_token is not None and not _is_local(settings.ml_target):
            raise InvalidSettings(
                f"OUTBOX_ML_TOKEN would travel in plain text to {settings.ml_target}: set OUTBOX_ML_TLS=true "
                "or OUTBOX_ML_CA_FILE"
            )
        return grpc.insecure_channel(settings.ml_target, options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=settings.ml_ca_file.read_bytes() if settings.ml_ca_file else None,
        private_key=settings.ml_private_key_file.read_bytes() if settings.ml_private_key_file else None,
        certificate_chain=settings.ml_certificate_file.read_bytes() if settings.ml_certificate_file else None,
    )
    return grpc.secure_channel(settings.ml_target, credentials, options)


def _is_local(target: str) -> bool:
    if target.startswith("unix:"):
        return True
    host = target.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
