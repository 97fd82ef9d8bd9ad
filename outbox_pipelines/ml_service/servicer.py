"""The two calls of the contract, and the status each failure gets."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc

from outbox_pipelines import tracing
from outbox_pipelines.ml_service.batch import learn_batch
from outbox_pipelines.ml_service.in_flight import InFlight, Stopping
from outbox_pipelines.ml_service.model import BadExample, parse_features
from outbox_pipelines.ml_service.open_tenants import OpenTenants
from outbox_pipelines.ml_service.state import StateError, StateFolder
from outbox_pipelines.ml_service.training_pb2 import (
    DESCRIPTOR,
    PredictRequest,
    PredictResponse,
    Rejection,
    TrainBatchRequest,
    TrainBatchResponse,
)
from outbox_pipelines.ml_service.training_pb2_grpc import TrainingServicer

if TYPE_CHECKING:
    from grpc import ServicerContext

_log = logging.getLogger(__name__)

_SERVICE: str = DESCRIPTOR.services_by_name["Training"].full_name


class _Refusal(Exception):
    """Ends a call with a status other than OK."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class OnlineTraining(TrainingServicer):
    """Learns and predicts with one online model per tenant. OK means durable."""

    def __init__(self, folder: StateFolder, in_flight: InFlight) -> None:
        self._folder = folder
        self._tenants = OpenTenants(folder)
        self._in_flight = in_flight

    def TrainBatch(self, request: TrainBatchRequest, context: ServicerContext) -> TrainBatchResponse:  # noqa: N802 -- named by the contract
        with self._answering("TrainBatch", context) as span:
            span.set("outbox.rows", len(request.examples))
            tenant = _tenant_of(request)
            with self._tenants.borrow(tenant) as state:
                judgement = learn_batch(state, request.examples)
                if judgement.newly_learned:
                    self._folder.save(tenant, state)
        _log.debug(
            "tenant %s, batch %s: %d accepted, %d of them new, %d rejected",
            tenant,
            request.batch_key,
            len(judgement.accepted),
            judgement.newly_learned,
            len(judgement.rejected),
        )
        return TrainBatchResponse(
            accepted=judgement.accepted,
            rejected=[Rejection(id=id_, reason=reason) for id_, reason in judgement.rejected.items()],
        )

    def Predict(self, request: PredictRequest, context: ServicerContext) -> PredictResponse:  # noqa: N802 -- named by the contract
        with self._answering("Predict", context):
            tenant = _tenant_of(request)
            features = [_features_at(index, text) for index, text in enumerate(request.features)]
            with self._tenants.borrow(tenant) as state:
                return PredictResponse(
                    probabilities=[state.model.probability(each) for each in features],
                    examples_seen=state.model.examples_seen,
                )

    @contextmanager
    def _answering(self, method: str, context: ServicerContext) -> Iterator[tracing.Span]:
        """What every call has: a status for each failure, and a span that is the caller's child."""
        about = {"rpc.system": "grpc", "rpc.service": _SERVICE, "rpc.method": method}
        carrier = dict(context.invocation_metadata())
        with tracing.span(f"{_SERVICE}/{method}", tracing.Kind.SERVER, about, carrier=carrier) as span:
            try:
                with self._refusing(context):
                    yield span
            except Exception:
                # Ended by abort, whose exception says nothing.
                code = context.code() or grpc.StatusCode.UNKNOWN
                span.set("rpc.grpc.status_code", code.value[0])
                span.fail(code.name)
                raise
            span.set("rpc.grpc.status_code", grpc.StatusCode.OK.value[0])

    @contextmanager
    def _refusing(self, context: ServicerContext) -> Iterator[None]:
        try:
            with self._in_flight.call():
                yield
        except Stopping:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the service is stopping")
        except _Refusal as refusal:
            context.abort(refusal.code, refusal.details)
        except StateError as error:
            _log.error("%s", error)
            context.abort(grpc.StatusCode.INTERNAL, str(error))
        except Exception:
            # Whatever it was, gRPC would send its text to the caller, and that may quote the payload.
            _log.exception("a call failed unexpectedly")
            context.abort(grpc.StatusCode.INTERNAL, "unexpected error; the service's log has it")


def _tenant_of(request: TrainBatchRequest | PredictRequest) -> str:
    if not request.tenant:
        # Not INVALID_ARGUMENT: that would blame a row, and the caller would search for it.
        raise _Refusal(grpc.StatusCode.FAILED_PRECONDITION, "the request names no tenant")
    return request.tenant


def _features_at(index: int, text: str) -> Mapping[str, float]:
    try:
        return parse_features(text)
    except BadExample as bad:
        raise _Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"features[{index}]: {bad.reason}") from None
