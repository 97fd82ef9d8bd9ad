from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from outbox_pipelines.ml_service.server import SERVICE_NAME, MlServer
from outbox_pipelines.ml_service.tls import TlsError
from tests.certificates import Identity, make_identity, needs_openssl

from .client import SERVING, Client, refused
from .rows import rows

TOKEN = "correct-horse"


@pytest.mark.parametrize("sent", [None, "", "correct-hors", "correct-horse ", "Correct-Horse"])
def test_without_the_token_nothing_is_learned_or_told(state_dir: Path, sent: str | None) -> None:
    with (
        MlServer(state_dir=state_dir, token=TOKEN) as server,
        Client(server.port, token=sent) as stranger,
        Client(server.port, token=TOKEN) as caller,
    ):
        for call in (lambda: stranger.train(rows(3)), stranger.predict):
            with pytest.raises(grpc.RpcError) as error:
                call()
            assert refused(error)[0] is grpc.StatusCode.UNAUTHENTICATED
            assert TOKEN not in refused(error)[1]
        assert caller.predict().examples_seen == 0
        assert list(caller.train(rows(3)).accepted) == [1, 2, 3]


def test_health_needs_no_token(state_dir: Path) -> None:
    with MlServer(state_dir=state_dir, token=TOKEN) as server, Client(server.port) as probe:
        assert probe.health() == probe.health(SERVICE_NAME) == SERVING


@pytest.mark.parametrize("token", ["", " ", "padded ", "naïve", "two\nlines"])
def test_a_token_no_caller_could_send_is_refused_at_once(state_dir: Path, token: str) -> None:
    with pytest.raises(ValueError, match="bearer token"):
        MlServer(state_dir=state_dir, token=token)


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    folder = tmp_path_factory.mktemp("certificates")
    return {name: make_identity(folder, name) for name in ("server", "client", "stranger")}


def credentials(server: Identity, client: Identity | None = None) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=server.certificate.read_bytes(),
        private_key=None if client is None else client.private_key.read_bytes(),
        certificate_chain=None if client is None else client.certificate.read_bytes(),
    )


@needs_openssl
def test_a_server_with_a_certificate_speaks_only_tls(state_dir: Path, identities: dict[str, Identity]) -> None:
    own, stranger = identities["server"], identities["stranger"]
    with MlServer(state_dir=state_dir, certificate=own.certificate, private_key=own.private_key, token=TOKEN) as server:
        with Client(server.port, token=TOKEN, credentials=credentials(own)) as client:
            assert list(client.train(rows(3)).accepted) == [1, 2, 3]
            assert client.health() == SERVING
        for other in (None, credentials(stranger)):
            with Client(server.port, token=TOKEN, credentials=other) as client:
                with pytest.raises(grpc.RpcError) as error:
                    client.train(rows(3))
                assert refused(error)[0] is grpc.StatusCode.UNAVAILABLE


@needs_openssl
def test_with_a_client_ca_only_its_clients_get_in(state_dir: Path, identities: dict[str, Identity]) -> None:
    own, known, stranger = (identities[name] for name in ("server", "client", "stranger"))
    with MlServer(
        state_dir=state_dir,
        certificate=own.certificate,
        private_key=own.private_key,
        client_ca=known.certificate,
    ) as server:
        with Client(server.port, credentials=credentials(own, known)) as client:
            assert list(client.train(rows(3)).accepted) == [1, 2, 3]
        for other in (None, stranger):
            with Client(server.port, credentials=credentials(own, other)) as client:
                with pytest.raises(grpc.RpcError) as error:
                    client.train(rows(3))
                assert refused(error)[0] is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("given", ["certificate", "private_key", "client_ca"])
def test_half_of_the_tls_files_is_refused_not_ignored(state_dir: Path, given: str) -> None:
    certificate, private_key, client_ca = (
        Path("file.pem") if name == given else None for name in ("certificate", "private_key", "client_ca")
    )
    with pytest.raises(TlsError, match="needs"):
        MlServer(state_dir=state_dir, certificate=certificate, private_key=private_key, client_ca=client_ca)


@needs_openssl
@pytest.mark.parametrize("fault", ["missing", "not PEM", "key of another", "client CA not PEM"])
def test_tls_files_that_cannot_work_are_named_at_start(
    state_dir: Path, identities: dict[str, Identity], tmp_path: Path, fault: str
) -> None:
    own = identities["server"]
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    certificate, private_key, client_ca, named = {
        "missing": (tmp_path / "none.pem", own.private_key, None, "none.pem"),
        "not PEM": (junk, own.private_key, None, "junk.pem"),
        "key of another": (own.certificate, identities["stranger"].private_key, None, "stranger.key"),
        "client CA not PEM": (own.certificate, own.private_key, junk, "junk.pem"),
    }[fault]
    server = MlServer(state_dir=state_dir, certificate=certificate, private_key=private_key, client_ca=client_ca)
    with pytest.raises(TlsError, match=named):
        server.start()
    with MlServer(state_dir=state_dir):
        pass  # the failed start gave the folder back
