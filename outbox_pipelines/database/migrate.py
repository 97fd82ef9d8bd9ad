"""Bring the control schema ``outbox`` and every tenant's schema to this version of the code."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine, quoted_name, text
from sqlalchemy.exc import DBAPIError

from outbox_pipelines.database.engine import check_server, describe, explained
from outbox_pipelines.database.error_text import first_line
from outbox_pipelines.database.quoting import driver_identifier
from outbox_pipelines.errors import OutboxError

CONTROL_SCHEMA = "outbox"
_TENANT_TABLES = ("ml_outbox", "ml_outbox_dead")

TENANT_TRIGGERS = ("outbox_note_deleted", "outbox_note_truncated")
"""On a tenant's outbox: they note rows that are removed by hand."""
_ALEMBIC = threading.Lock()
_LOCK_WAIT_SECONDS = 300
"""How long one migration waits for another process's; each takes well under a second."""


class NotMigrated(OutboxError):
    """The database lacks the tables of this version."""


class TenantsNotMigrated(OutboxError):
    """Some tenants' schemas could not be migrated; the text names each with its reason."""


class ForeignTable(OutboxError):
    """A tenant's schema holds a table of our name that we did not make."""


class DatabaseNewer(OutboxError):
    """The database was migrated by a newer version of the code."""


@dataclass(frozen=True)
class _Line:
    """A line of migrations: its scripts and where the reached version is noted."""

    scripts: ScriptDirectory
    config: Config
    schema: str
    version_table: str


def migrate(engine: Engine) -> int:
    """Migrate everything; safe to repeat and from several processes at once.

    Returns:
        How many schemas were changed.

    Raises:
        DatabaseNewer: the control schema is newer; nothing was changed.
        TenantsNotMigrated: some tenants' schemas could not be; the others were.
    """
    with explained(engine), engine.begin() as connection:
        check_server(connection)
        _lock(connection, CONTROL_SCHEMA)
        connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {CONTROL_SCHEMA}")
        changed = int(_upgrade(connection, _control_line()))
        schemas = (
            connection.execute(text("SELECT schema_name FROM outbox.tenants ORDER BY schema_name")).scalars().all()
        )
        existing = set(connection.execute(text("SELECT nspname FROM pg_namespace")).scalars())
    failed: list[str] = []
    # A schema that is gone is reported by the sensor and by `outbox tenants list`.
    for schema in (name for name in schemas if name in existing):
        try:
            with engine.begin() as connection:
                changed += migrate_tenant(connection, schema)
        except (OutboxError, DBAPIError) as error:
            # One tenant's trouble is not the others': all are tried, then it is told.
            failed.append(str(error) if isinstance(error, OutboxError) else f"{schema}: {first_line(error.orig)}")
    if failed:
        raise TenantsNotMigrated(
            f"{len(failed)} of {len(schemas)} tenants could not be migrated, the others were:\n  " + "\n  ".join(failed)
        )
    return changed


def migrate_tenant(connection: Connection, schema: str) -> bool:
    """Migrate one tenant's existing schema in the caller's transaction; says whether it changed.

    Raises:
        DatabaseNewer, ForeignTable: nothing was changed.
    """
    _lock(connection, schema)
    line = _tenant_line(schema)
    reached = _context(connection, line).get_current_heads()
    _refuse_newer(connection, line, reached)
    tables = _tables(connection, schema)
    if tables and not reached:
        raise ForeignTable(
            f"schema {schema!r} already has a table {', '.join(sorted(tables))} that is not ours: "
            "rename it, or give the tenant another schema with --schema"
        )
    if reached and (len(tables) < len(_TENANT_TABLES) or not _has_triggers(connection, schema)):
        # A table or trigger was dropped by hand: what the schema says of its version is no longer so. The
        # tenants' migrations can be repeated, and make what is missing.
        connection.exec_driver_sql(f"DELETE FROM {driver_identifier(schema)}.{line.version_table}")
    return _upgrade(connection, line)


def _tables(connection: Connection, schema: str) -> set[str]:
    query = text("""
        SELECT relname FROM pg_class JOIN pg_namespace AS space ON space.oid = relnamespace
        WHERE space.nspname = :schema AND relname = ANY (:names)
    """)
    return set(connection.execute(query, {"schema": schema, "names": list(_TENANT_TABLES)}).scalars())


def _has_triggers(connection: Connection, schema: str) -> bool:
    query = text("""
        SELECT count(*) FROM pg_trigger JOIN pg_class AS class ON class.oid = tgrelid
        JOIN pg_namespace AS space ON space.oid = relnamespace
        WHERE space.nspname = :schema AND relname = 'ml_outbox' AND tgname = ANY (:names)
    """)
    names = list(TENANT_TRIGGERS)
    return bool(connection.execute(query, {"schema": schema, "names": names}).scalar_one() == len(names))


def require_migrated(engine: Engine) -> None:
    """Check that the control schema is at this version.

    Raises:
        NotMigrated: with the command that mends it.
        DatabaseNewer: when the code is the one that is behind.
    """
    line = _control_line()
    with explained(engine), engine.connect() as connection:
        check_server(connection)
        current = _context(connection, line).get_current_heads()
        _refuse_newer(connection, line, current)
    if set(current) != set(line.scripts.get_heads()):
        at = ", ".join(current) or "empty"
        raise NotMigrated(
            f"{describe(engine)} is not migrated (it is {at}, this version needs "
            f"{', '.join(line.scripts.get_heads())}): run `outbox migrate`"
        )


def _upgrade(connection: Connection, line: _Line) -> bool:
    before = _context(connection, line).get_current_heads()
    _refuse_newer(connection, line, before)
    if set(before) == set(line.scripts.get_heads()):
        return False

    def steps(revision: tuple[str, ...], _context: MigrationContext) -> Iterable[object]:
        # Alembic's own recipe for upgrading without an env.py; it has no public name.
        return line.scripts._upgrade_revs("heads", revision)  # type: ignore[arg-type]

    # Alembic's context and op are global to the process; threads take turns.
    with _ALEMBIC, EnvironmentContext(line.config, line.scripts, fn=steps) as environment:
        environment.configure(connection=connection, version_table=line.version_table, version_table_schema=line.schema)
        environment.run_migrations()
    return True


def _context(connection: Connection, line: _Line) -> MigrationContext:
    return MigrationContext.configure(
        connection, opts={"version_table": line.version_table, "version_table_schema": line.schema}
    )


def _refuse_newer(connection: Connection, line: _Line, current: Sequence[str]) -> None:
    for revision in current:
        try:
            line.scripts.get_revision(revision)
        except CommandError:
            raise DatabaseNewer(
                f"schema {line.schema!r} of {describe(connection.engine)} is at version {revision}, newer than "
                f"this code knows (up to {', '.join(line.scripts.get_heads())}): upgrade outbox-pipelines"
            ) from None


def _lock(connection: Connection, schema: str) -> None:
    """Let one process migrate a schema at a time.

    An advisory lock of the transaction, not of the session: it works behind a pooler in
    transaction mode and is freed with the transaction, whatever becomes of the process.
    """
    names = ("lock_timeout", "statement_timeout")
    before = [connection.execute(text("SELECT current_setting(:name)"), {"name": name}).scalar_one() for name in names]
    set_local = text("SELECT set_config(:name, :value, true)")
    for name in names:
        connection.execute(set_local, {"name": name, "value": f"{_LOCK_WAIT_SECONDS}s"})
    connection.execute(
        text("SELECT pg_advisory_xact_lock(hashtext('outbox_pipelines migrate'), hashtext(:schema))"),
        {"schema": schema},
    )
    # The rest of the transaction, which may be a caller's, keeps its own time-outs.
    for name, value in zip(names, before, strict=True):
        connection.execute(set_local, {"name": name, "value": value})


def _control_line() -> _Line:
    return _line("control", CONTROL_SCHEMA, "schema_version")


def _tenant_line(schema: str) -> _Line:
    # The tenant's schema is the application's: our table's name says whose version it is.
    return _line("tenant", schema, "ml_outbox_version")


def _line(folder: str, schema: str, version_table: str) -> _Line:
    config = Config()
    # Escaped, since Alembic's options are interpolated.
    location = str(Path(__file__).parent / "migrations" / folder).replace("%", "%%")
    config.set_main_option("script_location", location)
    config.set_main_option("path_separator", "newline")
    config.attributes["schema"] = schema
    # Quoted always: SQLAlchemy's own test for names that need it misses some, a final line end for one.
    return _Line(ScriptDirectory.from_config(config), config, quoted_name(schema, quote=True), version_table)
