"""Stands between a worker and its database, and can fall silent or go away."""

import shutil
import socket
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from sqlalchemy import make_url

from outbox_pipelines.database.url import render

_SOCKET = ".s.PGSQL.5432"


class SilentProxy:
    """Forwards bytes to the server of ``database_url``; use it as a context manager."""

    def __init__(self, database_url: str) -> None:
        self._server = make_url(database_url)
        self._folder = Path(tempfile.mkdtemp(prefix="proxy-"))
        self._speaks = threading.Event()
        self._speaks.set()
        self._gone = False
        self._sockets: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / _SOCKET))
        self._listener.listen(50)

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.go_away()
        shutil.rmtree(self._folder)

    @property
    def url(self) -> str:
        """The database's URL through here."""
        return render(self._server.set(host=None, port=None, query={"host": str(self._folder)}))

    def fall_silent(self) -> None:
        """Pass nothing on any more, and cut nothing off."""
        self._speaks.clear()

    def speak(self) -> None:
        """Pass on what has gathered, and all that comes."""
        self._speaks.set()

    def go_away(self) -> None:
        """Cut off all connections and refuse new ones."""
        self._gone = True
        self._speaks.set()
        (self._folder / _SOCKET).unlink(missing_ok=True)
        for one in [self._listener, *self._sockets]:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                # It has ended already.
                continue

    def _accept(self) -> None:
        while not self._gone:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = self._connect()
            self._sockets += [client, server]
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _connect(self) -> socket.socket:
        folder = self._server.query.get("host")
        if isinstance(folder, str) and folder.startswith("/"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(f"{folder}/.s.PGSQL.{self._server.port or 5432}")
            return server
        return socket.create_connection((self._server.host or "localhost", self._server.port or 5432))

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                self._speaks.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            # One end is gone; the other learns of it by its own socket.
            return
