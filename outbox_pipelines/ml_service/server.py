"""The reference ML service as a gRPC server, and as a process."""

from __future__ import annotations

import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outbox_pipelines.ml_service.authentication import BearerToken
from outbox_pipelines.ml_service.in_flight import InFlight
from outbox_pipelines.ml_service.model import MissingExtra, OnlineModel
from outbox_pipelines.ml_service.servicer import OnlineTraining
from outbox_pipelines.ml_service.state import StateFolder
from outbox_pipelines.ml_service.tls import TlsFiles
from outbox_pipelines.ml_service.training_pb2 import DESCRIPTOR
from outbox_pipelines.ml_service.training_pb2_grpc import add_TrainingServicer_to_server

#: The gRPC service's full name, also its name in the health service.
SERVICE_NAME: str = DESCRIPTOR.services_by_name["Training"].full_name

#: gRPC's own default limit of one message, in bytes.
DEFAULT_MAX_MESSAGE_BYTES = 4 * 1024 * 1024

#: How long calls in progress may take to end when the process is asked to stop, in seconds.
STOP_GRACE = 10.0

#: How long the last answers may take to leave, and open health watches to end, in seconds.
_FLUSH = 1.0

_log = logging.getLogger(__name__)


class CannotListen(OSError):
    """The server cannot listen on its address; the text says why."""


class PortTaken(CannotListen):
    """Something else listens on the port already."""


class MlServer:
    """Serves `outbox_pipelines.v1.Training` with health and reflection. Starts once.

    >>> with MlServer(state_dir=Path("state")) as server:      # doctest: +SKIP
    ...     channel = grpc.insecure_channel(f"127.0.0.1:{server.port}")
    """

    def __init__(
        self,
        *,
        state_dir: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        certificate: Path | None = None,
        private_key: Path | None = None,
        client_ca: Path | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        workers: int = 16,
    ) -> None:
        """Describes a server; `start` opens it.

        `port` 0 takes a free one. `workers` is how many calls run at once; most of a call is waiting
        for the disk. Raises ValueError for a token or a set of TLS files that cannot work.
        """
        self.host = host
        self.port = port
        self._state_dir = state_dir
        self._tls = TlsFiles.of(certificate, private_key, client_ca)
        self._interceptors = [] if token is None else [BearerToken(token, SERVICE_NAME)]
        self._max_message_bytes = max_message_bytes
        self._workers = workers
        self._in_flight = InFlight()
        self._health = health.HealthServicer()
        self._server: grpc.Server | None = None
        self._open = ExitStack()

    def start(self) -> int:
        """Starts serving; returns the port.

        Raises `PortTaken` or `CannotListen` for the address, `TlsError` for the files, `StateError`
        for the state folder, and `MissingExtra` where river or the reflection service is missing.
        """
        if self._server is not None:
            raise RuntimeError("this server was started before; make a new one")
        OnlineModel()  # a missing river is found now, not by the first call
        with ExitStack() as opening:
            folder = opening.enter_context(StateFolder(self._state_dir))
            # Ended before the folder is given up: a call that outlasts the grace may still be writing.
            threads = opening.enter_context(ThreadPoolExecutor(self._workers, thread_name_prefix="ml-service"))
            server = grpc.server(threads, interceptors=self._interceptors, options=self._options())
            add_TrainingServicer_to_server(  # type: ignore[no-untyped-call]  # generated without types
                OnlineTraining(folder, self._in_flight), server
            )
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
            _add_reflection(server)
            self.port = self._listen(server)
            for service in (health.OVERALL_HEALTH, SERVICE_NAME):
                self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
            server.start()
            self._server = server
            self._open = opening.pop_all()
        _log.info("ml service listens on %s:%d, state in %s", self.host, self.port, self._state_dir)
        return self.port

    def stop(self, grace: float = STOP_GRACE) -> None:
        """Stops: health says NOT_SERVING, new calls get UNAVAILABLE, calls in progress may end.

        Calls that take longer than `grace` seconds are cut off from their callers; what they learn is
        still saved or forgotten as a whole. Returns when nothing runs any more. Stopping twice is fine.
        """
        if self._server is None:
            return
        self._health.enter_graceful_shutdown()
        if not self._in_flight.drain(grace):
            _log.warning("calls still in progress after %.1f s are cut off", grace)
        self._server.stop(_FLUSH).wait()
        self._open.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_receive_message_length", self._max_message_bytes),
            # Otherwise a second server would share the port, and half of the calls would go to each.
            ("grpc.so_reuseport", 0),
        ]

    def _listen(self, server: grpc.Server) -> int:
        host = f"[{self.host}]" if ":" in self.host else self.host
        address = f"{host}:{self.port}"
        try:
            if self._tls is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._tls.credentials())
        except RuntimeError as error:
            raise self._cannot_listen(address) from error
        return int(port)

    def _cannot_listen(self, address: str) -> CannotListen:
        # gRPC does not say why; trying the address once more does.
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            socket.create_server((self.host, self.port), family=family).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return PortTaken(
                    error.errno,
                    f"{address} is taken; stop the process that listens there or name another port",
                )
            return CannotListen(error.errno, f"cannot listen on {address}: {error.strerror}")
        return CannotListen(errno.EADDRNOTAVAIL, f"cannot listen on {address}; try again")


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    state_dir: Path,
    token: str | None = None,
    certificate: Path | None = None,
    private_key: Path | None = None,
    client_ca: Path | None = None,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then stops gracefully. Call it from the main thread.

    `on_ready` is called with the port once calls are answered. Raises what `MlServer` raises.
    """
    server = MlServer(
        host=host,
        port=port,
        state_dir=state_dir,
        token=token,
        certificate=certificate,
        private_key=private_key,
        client_ca=client_ca,
        max_message_bytes=max_message_bytes,
    )
    with _stop_signals() as signals, server:
        if on_ready is not None:
            on_ready(server.port)
        received = _wait_for(signals)
        _log.info("%s received, stopping", signal.Signals(received).name)


def _wait_for(signals: SimpleQueue[int]) -> int:
    # In short waits: a signal may interrupt another thread, and handlers run in this one when it wakes.
    while True:
        try:
            return signals.get(timeout=0.5)
        except Empty:
            continue


@contextmanager
def _stop_signals() -> Iterator[SimpleQueue[int]]:
    # Not an Event: setting one in a handler can deadlock with the wait that the signal interrupted.
    signals: SimpleQueue[int] = SimpleQueue()
    before = {
        number: signal.signal(number, lambda received, _frame: signals.put(received))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _add_reflection(server: grpc.Server) -> None:
    try:
        from grpc_reflection.v1alpha import reflection
    except ModuleNotFoundError as error:
        raise MissingExtra("grpcio-reflection") from error
    reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
