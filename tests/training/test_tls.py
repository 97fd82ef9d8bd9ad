"""The client's side of TLS, mTLS and the bearer token, against the reference service."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine

from outbox_pipelines.ml_service.server import MlServer
from outbox_pipelines.settings import InvalidSettings, Settings
from outbox_pipelines.tenants.registry import Problem
from outbox_pipelines.training.grpc_sink import GrpcSink
from tests.certificates import Identity, make_identity, needs_openssl
from tests.outboxes import enqueue, flush, ledger_ids, new_tenant, waiting_ids

MakeSettings = Callable[..., Settings]

pytestmark = needs_openssl


@pytest.fixture(scope="session")
def server_identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    """What the service shows."""
    return make_identity(tmp_path_factory.mktemp("server"), "server")


@pytest.fixture(scope="session")
def client_identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    """What we show."""
    return make_identity(tmp_path_factory.mktemp("client"), "client")


def test_rows_travel_over_tls_with_client_certificate_and_token(
    engine: Engine, make_settings: MakeSettings, server_identity: Identity, client_identity: Identity, tmp_path: Path
) -> None:
    tenant = new_tenant(engine)
    ids = enqueue(engine, tenant, [{"features": {"a": 1.0}, "label": True}])
    with MlServer(
        state_dir=tmp_path / "models",
        token="sesame",
        certificate=server_identity.certificate,
        private_key=server_identity.private_key,
        client_ca=client_identity.certificate,
    ) as server:
        target = f"localhost:{server.port}"
        trusted = {"ml_target": target, "ml_ca_file": server_identity.certificate, "ml_token": "sesame"}
        stranger = flush(engine, make_settings(**trusted), tenant)
        assert stranger.failed[0].problem is Problem.UNWELL
        known = {
            **trusted,
            "ml_certificate_file": client_identity.certificate,
            "ml_private_key_file": client_identity.private_key,
        }
        without_token = flush(engine, make_settings(**{**known, "ml_token": "wrong"}), tenant)
        assert without_token.failed[0].problem is Problem.MISCONFIGURED
        assert waiting_ids(engine, tenant) == ids
        assert flush(engine, make_settings(**known), tenant).failed == []
    assert ledger_ids(engine, tenant) == ids


def test_a_server_whose_certificate_is_not_trusted_gets_nothing(
    engine: Engine, make_settings: MakeSettings, server_identity: Identity, client_identity: Identity, tmp_path: Path
) -> None:
    tenant = new_tenant(engine, rows=1)
    with MlServer(
        state_dir=tmp_path / "models",
        certificate=server_identity.certificate,
        private_key=server_identity.private_key,
    ) as server:
        settings = make_settings(ml_target=f"localhost:{server.port}", ml_ca_file=client_identity.certificate)
        assert flush(engine, settings, tenant).failed[0].problem is Problem.UNWELL
    assert waiting_ids(engine, tenant) == [1]


@pytest.mark.parametrize("target", ["ml.example:50051", "10.0.0.7:50051", "[2001:db8::1]:50051"])
def test_a_token_does_not_travel_in_plain_text_to_another_machine(make_settings: MakeSettings, target: str) -> None:
    with pytest.raises(InvalidSettings, match="OUTBOX_ML_TLS=true"):
        GrpcSink(make_settings(ml_target=target, ml_token="sesame"))


@pytest.mark.parametrize("target", ["127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/tmp/none"])
def test_a_token_may_stay_on_this_machine(make_settings: MakeSettings, target: str) -> None:
    GrpcSink(make_settings(ml_target=target, ml_token="sesame")).close()
