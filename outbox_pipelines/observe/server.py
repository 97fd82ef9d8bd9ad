"""``outbox health-server``: looks at the database again and again, and answers from the last look.

So an answer never waits for the database, however large it is or slow, and many who ask cost it nothing.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import uvicorn
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outbox_pipelines.database.engine import DatabaseUnreachable, explained
from outbox_pipelines.database.migrate import DatabaseNewer, NotMigrated, require_migrated
from outbox_pipelines.observe.health import messaging, readiness
from outbox_pipelines.observe.metrics import render
from outbox_pipelines.observe.reading import Reading, take_reading
from outbox_pipelines.settings import Settings

_logger = logging.getLogger(__name__)

_MISSED_LOOKS = 3
"""Looks that may be late or fail before what the last one found counts as old."""

_REST = 9
"""Looks take a tenth of the time at most: after one that took long, the next one waits so many times as long."""

_HUNG_SECONDS = 300.0
"""How long one look may take before the process counts as hung: no statement of it may take so long."""


@dataclass(frozen=True)
class Looked:
    """What the looks have come to."""

    reading: Reading | None
    """The last one that succeeded."""

    read_at: float
    """When it began (monotonic)."""

    problem: str | None
    """Why the last look failed, in words that anybody may read."""


class Looker:
    """Takes a reading again and again in a thread of its own; use it as a context manager."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._stopping = threading.Event()
        self._began_at = time.monotonic()
        self.looked = Looked(None, self._began_at, "the database has not been looked at yet")
        self._thread = threading.Thread(target=self._run, name="look", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(5)

    @property
    def is_hung(self) -> bool:
        """Whether looking has ended, or a look does not end."""
        allowed = max(_HUNG_SECONDS, self._pause() * _MISSED_LOOKS)
        return not self._thread.is_alive() or time.monotonic() - self._began_at > allowed

    @property
    def old_after_seconds(self) -> float:
        """The age from which on a reading tells nothing of now."""
        return _MISSED_LOOKS * self._pause() + self._settings.statement_timeout

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._began_at = time.monotonic()
            self.looked = self._look()
            self._stopping.wait(self._pause())

    def _pause(self) -> float:
        reading = self.looked.reading
        return max(self._settings.health_refresh_seconds, _REST * (reading.seconds if reading else 0.0))

    def _look(self) -> Looked:
        began, before = self._began_at, self.looked
        try:
            # Each time: another may migrate the database, to a newer version, too.
            require_migrated(self._engine)
            with explained(self._engine):
                return Looked(take_reading(self._engine, self._settings), began, None)
        except (NotMigrated, DatabaseNewer) as error:
            told = "run `outbox migrate`" if isinstance(error, NotMigrated) else "upgrade outbox-pipelines"
            problem = f"the database is not at this version: {told}"
        except DatabaseUnreachable as error:
            problem = "the database does not answer; the log of the health server says why"
            _logger.warning("%s", error)
        except SQLAlchemyError as error:
            problem = f"the database could not be read ({type(error).__name__}); see the log of the health server"
            _logger.warning("a look failed and is tried again: %s", type(error).__name__)
        except Exception:  # whatever it is, the next look may succeed; and the log has it
            problem = "looking failed; see the log of the health server"
            _logger.exception("a look failed and is tried again")
        return Looked(before.reading, before.read_at, problem)


def application(looker: Looker) -> Starlette:
    """The routes: ``/health/live``, ``/health/ready``, ``/health/messaging`` and ``/metrics``."""

    def live(_request: Request) -> Response:
        if looker.is_hung:
            return _answer(
                {"status": "hung", "problems": ["looking at the database has stopped; restart this process"]}
            )
        return _answer({"status": "live", "problems": []})

    def ready(_request: Request) -> Response:
        return _of_reading(looker, _ready)

    def messages(_request: Request) -> Response:
        return _of_reading(looker, messaging)

    def metrics(request: Request) -> Response:
        reading, problem, _ = _current(looker)
        if reading is None or problem is not None:
            # No numbers: old ones would look like a system that stands still.
            return Response(f"# {problem}\n", 503, media_type="text/plain")
        content, content_type = render(reading, request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": content_type})

    return Starlette(
        routes=[
            Route("/health/live", live),
            Route("/health/ready", ready),
            Route("/health/messaging", messages),
            Route("/metrics", metrics),
        ]
    )


def _ready(reading: Reading) -> dict[str, Any]:
    problems, tasks = readiness(reading)
    return {"problems": problems, "tasks": tasks}


def _current(looker: Looker) -> tuple[Reading | None, str | None, float]:
    looked = looker.looked
    age = time.monotonic() - looked.read_at
    problem = looked.problem
    if problem is None and age > looker.old_after_seconds:
        problem = f"the last look at the database is {age:.0f} s old"
    return looked.reading, problem, age


def _of_reading(looker: Looker, tell: Callable[[Reading], dict[str, Any]]) -> Response:
    reading, problem, age = _current(looker)
    told: dict[str, Any] = {"problems": []}
    if reading is not None:
        told = {"taken_at": reading.taken_at.isoformat(), "age_seconds": round(age, 1), **tell(reading)}
    if problem is not None:
        told["problems"] = [problem, *told["problems"]]
    return _answer({"status": "problems" if told["problems"] else "ok", **told})


def _answer(told: dict[str, Any]) -> Response:
    # Nobody in between is to keep an answer.
    return JSONResponse(told, 503 if told["problems"] else 200, headers={"Cache-Control": "no-store"})


def serve(engine: Engine, settings: Settings, *, host: str, port: int, on_ready: Callable[[int], None]) -> None:
    """Serve until the process is told to stop (SIGTERM, SIGINT).

    Args:
        engine: the database.
        settings: how often to look.
        host: address to listen on.
        port: 0 takes a free one.
        on_ready: called with the port once it listens.
    """

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_ready(self.servers[0].sockets[0].getsockname()[1])

    with Looker(engine, settings) as looker:
        config = uvicorn.Config(application(looker), host=host, port=port, log_level="warning", access_log=False)
        Server(config).run()
