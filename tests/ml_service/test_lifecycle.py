from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from outbox_pipelines.ml_service.server import SERVICE_NAME, CannotListen, MlServer, PortTaken
from outbox_pipelines.ml_service.state import StateError

from .client import DEADLINE, NOT_SERVING, SERVING, Client, refused
from .rows import TENANT, answers, directly_trained, rows
from .service_process import ServiceProcess


def test_a_server_says_on_which_port_it_listens(state_dir: Path) -> None:
    server = MlServer(state_dir=state_dir)
    port = server.start()
    try:
        assert port == server.port > 0
        with Client(port) as client:
            assert client.health() == client.health(SERVICE_NAME) == SERVING
    finally:
        server.stop()
    server.stop()  # a second time is fine


def test_a_server_restarted_goes_on_where_it_was(state_dir: Path) -> None:
    sent = rows(40)
    for part in (sent[:20], sent[20:]):
        with MlServer(state_dir=state_dir) as server, Client(server.port) as client:
            client.train(part)
            predicted = client.predict()
    assert predicted.examples_seen == 40
    assert list(predicted.probabilities) == answers(directly_trained(sent))


def test_a_port_that_is_taken_is_said_to_be_taken(server: MlServer, tmp_path: Path) -> None:
    second = MlServer(state_dir=tmp_path / "second", port=server.port)
    with pytest.raises(PortTaken, match=f"127.0.0.1:{server.port} is taken; .*name another port"):
        second.start()
    with MlServer(state_dir=tmp_path / "second"):
        pass  # the failed start gave the folder back


def test_an_address_of_another_machine_is_not_called_taken(state_dir: Path) -> None:
    with pytest.raises(CannotListen, match=r"cannot listen on 192\.0\.2\.1:") as error:
        MlServer(state_dir=state_dir, host="192.0.2.1").start()
    assert not isinstance(error.value, PortTaken)


def test_an_ipv6_address_may_be_listened_on(state_dir: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with MlServer(state_dir=state_dir, host="::1") as server:
        channel = grpc.insecure_channel(f"[::1]:{server.port}")
        with channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE).status == SERVING


def test_two_servers_never_share_a_state_folder(server: MlServer, state_dir: Path) -> None:
    with pytest.raises(StateError, match="in use by another server"):
        MlServer(state_dir=state_dir).start()


def test_the_service_describes_itself(server: MlServer) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        described = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE_NAME, "grpc.health.v1.Health"} <= set(described.get_services())
        file = described.FindFileContainingSymbol(SERVICE_NAME)
    assert [method.name for method in file.service[0].method] == ["TrainBatch", "Predict"]


@contextmanager
def slow_disk(state_dir: Path) -> Iterator[threading.Event]:
    """The tenant's state file is a pipe: reading it takes until the block ends, and gives 20 rows.

    The event is set once a call waits for it.
    """
    elsewhere = state_dir.with_name("elsewhere")
    with MlServer(state_dir=elsewhere) as server, Client(server.port) as client:
        client.train(rows(20))
    content = (elsewhere / f"{TENANT}.state").read_bytes()
    pipe = state_dir / f"{TENANT}.state"
    os.mkfifo(pipe)
    waiting, release = threading.Event(), threading.Event()

    def feed() -> None:
        with open(pipe, "wb") as opened:  # opens when the call opens it
            waiting.set()
            release.wait()
            opened.write(content)

    feeding = threading.Thread(target=feed, daemon=True)
    feeding.start()
    try:
        yield waiting
    finally:
        release.set()
        feeding.join(DEADLINE)


def wait_until_not_serving(probe: Client) -> None:
    while probe.health(SERVICE_NAME) != NOT_SERVING:
        pass


def test_while_stopping_health_says_so_and_the_call_in_progress_ends_well(state_dir: Path) -> None:
    server = MlServer(state_dir=state_dir)
    with Client(server.start()) as client, ThreadPoolExecutor(2) as background:
        with slow_disk(state_dir) as waiting:
            training = background.submit(client.train, rows(10, first_id=21))
            assert waiting.wait(DEADLINE)
            stopping = background.submit(server.stop, DEADLINE)
            wait_until_not_serving(client)
            assert client.health() == NOT_SERVING
            with pytest.raises(grpc.RpcError) as error:
                client.train(rows(1), tenant="another")
            assert refused(error) == (grpc.StatusCode.UNAVAILABLE, "the service is stopping")
            assert not stopping.done()
        assert list(training.result(DEADLINE).accepted) == list(range(21, 31))
        stopping.result(DEADLINE)
    with MlServer(state_dir=state_dir) as server, Client(server.port) as client:
        assert client.predict().examples_seen == 30


def test_a_call_that_outlasts_the_grace_is_cut_off_but_still_saved_whole(state_dir: Path) -> None:
    server = MlServer(state_dir=state_dir)
    with Client(server.start()) as client, ThreadPoolExecutor(2) as background:
        with slow_disk(state_dir) as waiting:
            training = background.submit(client.train, rows(10, first_id=21))
            assert waiting.wait(DEADLINE)
            stopping = background.submit(server.stop, 0.0)
            error = training.exception(DEADLINE)
            assert isinstance(error, grpc.RpcError)
            with pytest.raises(StateError, match="in use by another server"):
                MlServer(state_dir=state_dir).start()  # as long as the call may write
        stopping.result(DEADLINE)
    with MlServer(state_dir=state_dir) as server, Client(server.port) as client:
        assert client.predict().examples_seen == 30


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_served_process_ends_well_when_asked_to(state_dir: Path, number: signal.Signals) -> None:
    with ServiceProcess(state_dir) as service, Client(service.port) as client:
        client.train(rows(10))
        service.send(number)
        assert service.ended() == (0, "stopped\n")
    with MlServer(state_dir=state_dir) as server, Client(server.port) as client:
        assert client.predict().examples_seen == 10
