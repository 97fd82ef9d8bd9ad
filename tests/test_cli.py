"""The command line as scripts and people meet it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine

from outbox_pipelines import __version__
from outbox_pipelines.settings import Settings
from tests.command_line import Run, refused, succeeded
from tests.outboxes import dead_letters, enqueue, flush, ledger_ids, new_tenant, waiting_ids
from tests.scripted_service import ScriptedService, accept
from tests.upkeep.aged import bury

COMMANDS = [
    ("migrate",),
    ("tenants", "add"),
    ("tenants", "list"),
    ("tenants", "pause"),
    ("tenants", "resume"),
    ("tenants", "remove"),
    ("jobs", "enqueue"),
    ("jobs", "list"),
    ("jobs", "show"),
    ("jobs", "cancel"),
    ("jobs", "retry"),
    ("jobs", "servers"),
    ("dead-letters", "list"),
    ("dead-letters", "show"),
    ("dead-letters", "redrive"),
    ("dead-letters", "discard"),
    ("worker",),
    ("flush",),
    ("audit",),
    ("ml-service",),
    ("dev",),
    ("demo",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(outbox: Run, command: tuple[str, ...]) -> None:
    told = succeeded(outbox(*command, "--help"))
    assert f"$ outbox {' '.join(command)}" in told or f"outbox {' '.join(command)}" in told.split("Example:")[1]


def test_dead_letters_are_listed_shown_put_back_and_discarded(outbox: Run, engine: Engine) -> None:
    tenant = new_tenant(engine)
    bury(engine, tenant, 3, days=1)
    mine = ("--tenant", "acme")
    listed = json.loads(succeeded(outbox("dead-letters", "list", *mine, "--json")))
    assert [one["row_id"] for one in listed] == [3, 2, 1]
    shown = succeeded(outbox("dead-letters", "show", *mine, "2"))
    assert "row 2 of tenant acme\n  reason      no" in shown
    assert '{"n": 1}' in shown
    dry = succeeded(outbox("dead-letters", "redrive", *mine, "--all", "--dry-run"))
    assert dry == "tenant acme: 3 dead letters would be put back; nothing was changed\n"
    assert succeeded(outbox("dead-letters", "redrive", *mine, "2")) == "tenant acme: 1 dead letter put back\n"
    assert json.loads(succeeded(outbox("dead-letters", "discard", *mine, "1", "--json"))) == {"moved": [1]}
    assert "no dead letter 99: nothing was changed" in refused(outbox("dead-letters", "discard", *mine, "3", "99"))
    assert "name ids, or give --all (not both)" in refused(outbox("dead-letters", "redrive", *mine))
    assert (waiting_ids(engine, tenant), set(dead_letters(engine, tenant))) == ([2], {3})
    assert succeeded(outbox("dead-letters", "redrive", *mine, "--all")) == "tenant acme: 1 dead letter put back\n"
    assert succeeded(outbox("dead-letters", "list", *mine)) == "tenant acme has no dead letter\n"


def test_the_version_is_told(outbox: Run) -> None:
    assert succeeded(outbox("--version")).strip() == __version__


def test_a_tenants_life(outbox: Run, engine: Engine) -> None:
    added = json.loads(succeeded(outbox("tenants", "add", "acme", "--schema", 'tenant_x"y', "--json")))
    assert added["name"] == "acme"
    assert added["schema"] == 'tenant_x"y'
    assert "acme" in succeeded(outbox("tenants", "list"))
    succeeded(outbox("tenants", "pause", "acme"))
    (listed,) = json.loads(succeeded(outbox("tenants", "list", "--json")))
    assert (listed["tenant"]["paused"], listed["standing"]) == (True, "empty")
    succeeded(outbox("tenants", "resume", "acme"))
    succeeded(outbox("tenants", "remove", "acme", "--drop-schema"))
    assert "no tenant; see `outbox tenants add`" in succeeded(outbox("tenants", "list"))


def test_a_flush_delivers_and_an_audit_tells_who_did(
    outbox: Run, engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=12)
    assert json.loads(succeeded(outbox("flush", "--all", "--dry-run", "--json"))) == {"acme": 12}
    report = json.loads(succeeded(outbox("flush", "--tenant", "acme", "--json")))
    assert report["tenants"][0]["rows"] == 12
    assert waiting_ids(engine, tenant) == []
    history = json.loads(succeeded(outbox("audit", "--tenant", "acme", "--row", "11", "--json")))
    (delivery,) = history["deliveries"]
    assert history["fate"] == "delivered"
    assert (delivery["rows"], delivery["first_id"], delivery["last_id"]) == (2, 11, 12)
    assert delivery["run_id"].startswith("flush-")
    assert f"by run {delivery['run_id']}" in succeeded(outbox("audit", "--tenant", "acme", "--row", "12"))


def test_an_audit_tells_dead_waiting_and_unknown_rows(
    outbox: Run, engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=2)

    def reject_first(request: object, context: object) -> object:
        response = accept(request, context)  # type: ignore[arg-type]
        response.accepted.remove(1)
        response.rejected.add(id=1, reason="no label")
        return response

    service.answer = reject_first  # type: ignore[assignment]
    flush(engine, settings, tenant)
    enqueue(engine, tenant, [{"n": 3}])
    assert (dead_letters(engine, tenant), ledger_ids(engine, tenant)) == ({1: "no label"}, [2])
    assert "dead letter" in succeeded(outbox("audit", "--tenant", "acme", "--row", "1"))
    assert "no label" in succeeded(outbox("audit", "--tenant", "acme", "--row", "1"))
    assert "waiting" in succeeded(outbox("audit", "--tenant", "acme", "--row", "3"))
    unknown = outbox("audit", "--tenant", "acme", "--row", "99")
    assert (unknown.returncode, "unknown" in unknown.stdout) == (1, True)


def test_a_flush_that_failed_exits_with_1_and_keeps_the_rows(
    outbox: Run, engine: Engine, service: ScriptedService
) -> None:
    import grpc

    tenant = new_tenant(engine, rows=1)
    service.answer = lambda _request, context: context.abort(grpc.StatusCode.INTERNAL, "")  # type: ignore[return-value]
    done = outbox("flush", "--all")
    assert (done.returncode, "answered INTERNAL; next attempt in" in done.stdout) == (1, True)
    assert waiting_ids(engine, tenant) == [1]


def test_a_flush_to_a_service_that_is_not_there_touches_no_row(outbox: Run, engine: Engine) -> None:
    tenant = new_tenant(engine, rows=1)
    told = refused(outbox("flush", "--all", OUTBOX_ML_TARGET="127.0.0.1:1"))
    assert "error: ml-service 127.0.0.1:1 is unreachable (UNAVAILABLE" in told
    assert waiting_ids(engine, tenant) == [1]


def test_mistakes_get_a_line_that_says_what_and_the_remedy(outbox: Run, empty_database_url: str) -> None:
    assert "no tenant 'nobody' is registered: see `outbox tenants list`" in refused(
        outbox("flush", "--tenant", "nobody")
    )
    assert "run `outbox migrate`" in refused(outbox("tenants", "list", OUTBOX_DATABASE_URL=empty_database_url))
    assert "begins with 'mysql'" in refused(outbox("tenants", "list", OUTBOX_DATABASE_URL="mysql://a:secret@b/c"))
    unreachable = refused(outbox("tenants", "list", OUTBOX_DATABASE_URL="postgresql://u:secret@127.0.0.1:1/db"))
    assert "cannot connect to database 'db' on 127.0.0.1:1" in unreachable
    assert "secret" not in unreachable
    assert "OUTBOX_BATCH_SIZE='0'" in refused(outbox("tenants", "list", OUTBOX_BATCH_SIZE="0"))
    assert "cannot be called 'pg_x'" in refused(outbox("tenants", "add", "x", "--schema", "pg_x"))
    assert "name tenants with --tenant, or give --all (not both)" in refused(outbox("flush"), code=2)


def test_the_demo_does_not_touch_a_database_with_tenants_of_others(outbox: Run, engine: Engine) -> None:
    tenant = new_tenant(engine, "live", rows=3)
    assert "tenant 'live' is registered in" in refused(outbox("demo", "--once"))
    assert waiting_ids(engine, tenant) == [1, 2, 3]


def test_dev_does_not_send_a_named_databases_rows_to_a_service_that_nobody_named(outbox: Run) -> None:
    assert "OUTBOX_ML_TARGET no ML service: set it" in refused(outbox("dev", OUTBOX_ML_TARGET=""))


def test_local_mode_flushes_nothing_from_the_shell_either(outbox: Run, engine: Engine) -> None:
    tenant = new_tenant(engine, rows=3)
    told = refused(outbox("flush", "--all", OUTBOX_TRAIN_MODE="local"))
    assert "OUTBOX_TRAIN_MODE=local: flushing is off; no row was sent" in told
    assert waiting_ids(engine, tenant) == [1, 2, 3]


def test_what_the_database_refuses_is_told_in_a_line(outbox: Run, engine: Engine) -> None:
    tenant = new_tenant(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(f'DROP TABLE "{tenant.schema}".ml_outbox')
    told = refused(outbox("flush", "--tenant", "acme", "--dry-run"))
    assert f'refused: relation "{tenant.schema}.ml_outbox" does not exist' in told


def test_a_mistyped_ml_service_is_told_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "outbox_pipelines.cli",
            "ml-service",
            "--port",
            "0",
            "--state-dir",
            str(tmp_path / "file"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "error: " in refused(done)


def test_the_package_is_lazy() -> None:
    code = "import sys, outbox_pipelines; sys.exit(any(n in sys.modules for n in ('dagster', 'sqlalchemy', 'grpc')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
