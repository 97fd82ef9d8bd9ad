"""The database that the settings name: a server of the user's, or the embedded one."""

import atexit
import os
import threading
from types import TracebackType
from typing import Self

from sqlalchemy import Engine, text

from outbox_pipelines.database.embedded import EmbeddedServer
from outbox_pipelines.database.engine import explained, open_engine
from outbox_pipelines.database.migrate import require_migrated
from outbox_pipelines.database.quoting import driver_identifier
from outbox_pipelines.database.url import engine_url, render
from outbox_pipelines.settings import Settings

EMBEDDED_DATABASE = "outbox"


class Database:
    """Opens the database when it is first needed, in the process that needs it.

    Without ``OUTBOX_DATABASE_URL`` that starts the embedded server, or joins it where another
    process has; it stops with the last process that uses it.
    """

    def __init__(self, settings: Settings, *, application_name: str = "outbox_pipelines") -> None:
        self._settings = settings
        self._application_name = application_name
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._server: EmbeddedServer | None = None
        self._owner = os.getpid()

    @property
    def url(self) -> str:
        """The URL with its password; starts the embedded server where that is the database."""
        if self._settings.database_url is not None:
            return render(engine_url(self._settings.database_url.get_secret_value()))
        with self._lock:
            return self._embedded_url()

    @property
    def engine(self) -> Engine:
        """The engine of this process."""
        url = self.url
        with self._lock:
            if self._engine is not None and self._owner != os.getpid():
                # A fork: the connections belong to the parent, which is still using them.
                self._engine.dispose(close=False)
                self._engine = None
            if self._engine is None:
                self._engine = open_engine(self._settings, url, application_name=self._application_name)
                self._owner = os.getpid()
            return self._engine

    def migrated_engine(self) -> Engine:
        """The engine, when the database is at this version.

        Raises:
            NotMigrated, DatabaseNewer, DatabaseUnreachable: with the remedy.
        """
        require_migrated(self.engine)
        return self.engine

    def close(self) -> None:
        """Close the connections, and the embedded server if nobody else uses it."""
        with self._lock:
            if self._engine is not None:
                self._engine.dispose()
                self._engine = None
            if self._server is not None:
                self._server.__exit__()
                self._server = None
                atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.close()

    def _embedded_url(self) -> str:
        if self._server is None:
            self._server = EmbeddedServer(self._settings.home / "postgres").__enter__()
            atexit.register(self.close)
            ensure_database(self._settings, render(self._server.url("postgres")), EMBEDDED_DATABASE)
        return render(self._server.url(EMBEDDED_DATABASE))


def ensure_database(settings: Settings, url: str, name: str) -> None:
    """Create the database ``name`` on the server of ``url`` when it is missing."""
    engine = open_engine(settings, url, application_name="outbox_pipelines setup", pool_size=1)
    try:
        with explained(engine), engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            exists = text("SELECT EXISTS (SELECT FROM pg_database WHERE datname = :name)")
            if connection.execute(exists, {"name": name}).scalar_one():
                return
            try:
                connection.exec_driver_sql(f"CREATE DATABASE {driver_identifier(name)}")
            except Exception:
                # Another process may have made it at the same time.
                if not connection.execute(exists, {"name": name}).scalar_one():
                    raise
    finally:
        engine.dispose()
