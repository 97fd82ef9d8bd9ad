"""Other queues on PostgreSQL, at their best: no-op jobs finished per second by one worker process.

Each measurement has a new database on the named server, with logged tables, and counts from the
rival's own records. Needs ``pip install pgqueuer procrastinate asyncpg``.

    best = rivals.pgqueuer(url, 20_000)  # tries all settings, gives the fastest
    again = rivals.pgqueuer(url, 20_000, [best.settings])  # another round with those

``python -m benchmarks.rivals`` prints the figures of all settings.
"""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from sqlalchemy import make_url

Settings = Mapping[str, Any]

PGQUEUER: Sequence[Settings] = (
    *({"batch_size": size, "connections": 1} for size in (10, 50, 100, 200, 500)),
    # As its own benchmark does: several managers in one process, each with a connection of its own.
    *({"batch_size": size, "connections": 2} for size in (50, 100, 200, 500)),
)
PROCRASTINATE: Sequence[Settings] = (
    # As documented; then with leaner connections than it makes by itself, see _lean_pool.
    *({"concurrency": count, "lean": False} for count in (1, 10, 50)),
    *({"concurrency": count, "lean": True} for count in (1, 10, 50)),
)


@dataclass(frozen=True)
class Measured:
    """Jobs finished per second, completion written, from the first dequeue to the last completion."""

    name: str
    settings: Settings
    jobs_per_second: float


def pgqueuer(url: str, jobs: int = 20_000, settings: Sequence[Settings] = PGQUEUER) -> Measured:
    """The best of the given settings."""
    return max((measure("pgqueuer", url, jobs, each) for each in settings), key=lambda one: one.jobs_per_second)


def procrastinate(url: str, jobs: int = 3_000, settings: Sequence[Settings] = PROCRASTINATE) -> Measured:
    """The best of the given settings."""
    return max((measure("procrastinate", url, jobs, each) for each in settings), key=lambda one: one.jobs_per_second)


def measure(name: str, url: str, jobs: int, settings: Settings) -> Measured:
    """Enqueue the jobs, have a worker process finish them, and read from the database how long it took."""
    rival = _RIVALS[name]
    with _database(url, f"rival_{name}") as database:
        asyncio.run(rival.enqueue(database, jobs))
        # So that no measurement pays for writing back what the filling left.
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")
            connection.execute("CHECKPOINT")
        worker = [sys.executable, "-m", "benchmarks.rivals", name, database, json.dumps(dict(settings))]
        subprocess.run(worker, check=True)
        with psycopg.connect(database) as connection:
            finished, seconds = connection.execute(rival.finished).fetchone() or (0, 0)
    if finished != jobs:
        raise RuntimeError(f"{name} finished {finished} of {jobs} jobs")
    return Measured(name, settings, jobs / seconds)


@contextmanager
def _database(url: str, name: str) -> Iterator[str]:
    """A new database on the server, gone afterwards; gives its address as libpq and asyncpg read it."""
    address = make_url(url).set(drivername="postgresql")
    with psycopg.connect(address.render_as_string(hide_password=False), autocommit=True) as connection:
        connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'.encode())
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
        try:
            yield address.set(database=name).render_as_string(hide_password=False)
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


async def _noop(_job: object = None) -> None:
    """The handler of every job."""


async def _enqueue_pgqueuer(database: str, jobs: int) -> None:
    from pgqueuer import Queries
    from pgqueuer.adapters.connections import connect_asyncpg

    async with connect_asyncpg(database) as connection:
        queries = Queries.from_asyncpg_connection(connection)
        await queries.install()
        await queries.optimize_autovacuum()  # `pgq autovac`, the first item on its performance checklist
        await queries.enqueue(["noop"] * jobs, [None] * jobs, [0] * jobs)


async def _work_pgqueuer(database: str, settings: Settings) -> None:
    from pgqueuer import PgQueuer
    from pgqueuer.adapters.connections import connect_asyncpg
    from pgqueuer.types import QueueExecutionMode

    async with AsyncExitStack() as stack:
        runs = []
        for _ in range(settings["connections"]):
            manager = PgQueuer.from_asyncpg_connection(await stack.enter_async_context(connect_asyncpg(database)))
            manager.entrypoint("noop")(_noop)
            runs.append(manager.run(batch_size=settings["batch_size"], mode=QueueExecutionMode.drain))
        await asyncio.gather(*runs)


async def _enqueue_procrastinate(database: str, jobs: int) -> None:
    app, noop = _procrastinate_app(database)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        await noop.batch_defer_async(*({} for _ in range(jobs)))


async def _work_procrastinate(database: str, settings: Settings) -> None:
    app, _ = _procrastinate_app(database, {"pool_factory": _lean_pool} if settings["lean"] else {})
    async with app.open_async():
        await app.run_worker_async(concurrency=settings["concurrency"], wait=False)


def _procrastinate_app(database: str, arguments: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    from procrastinate import App, PsycopgConnector

    app = App(connector=PsycopgConnector(conninfo=database, **(arguments or {})))
    return app, app.task(name="noop")(_noop)


def _lean_pool(**arguments: Any) -> Any:
    """Connections in autocommit, and not tried out with a query each time they are taken from the pool.

    By itself it sends BEGIN and COMMIT around each statement and a query before it: four journeys
    instead of one. Its documentation tells of ``pool_factory``, not of this use.
    """
    from psycopg_pool import AsyncConnectionPool

    async def autocommit(connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.set_autocommit(True)

    return AsyncConnectionPool(**{**arguments, "check": None, "configure": autocommit})


@dataclass(frozen=True)
class _Rival:
    enqueue: Callable[[str, int], Coroutine[Any, Any, None]]
    """Install the schema and enqueue that many jobs."""
    work: Callable[[str, Settings], Coroutine[Any, Any, None]]
    """Run a worker until no job is left."""
    finished: LiteralString
    """How many jobs were finished, and the seconds from the first dequeue to the last completion."""


_FINISHED: LiteralString = (
    "SELECT count(*) FILTER (WHERE {done}), extract(epoch FROM"
    " max({at}) FILTER (WHERE {done}) - min({at}) FILTER (WHERE {begun}))::float FROM {table}"
)
_RIVALS = {
    "pgqueuer": _Rival(
        _enqueue_pgqueuer,
        _work_pgqueuer,
        _FINISHED.format(at="created", begun="status = 'picked'", done="status = 'successful'", table="pgqueuer_log"),
    ),
    "procrastinate": _Rival(
        _enqueue_procrastinate,
        _work_procrastinate,
        _FINISHED.format(at="at", begun="type = 'started'", done="type = 'succeeded'", table="procrastinate_events"),
    ),
}


def main(arguments: Sequence[str]) -> None:
    """Be the worker that the arguments tell of; without any, print the figures of all settings."""
    if arguments:
        import uvloop

        logging.disable()  # a line per job would measure the terminal
        name, database, settings = arguments
        uvloop.run(_RIVALS[name].work(database, json.loads(settings)))
        return
    from benchmarks.setting import server

    with server() as url:
        for name, jobs, every in (("pgqueuer", 20_000, PGQUEUER), ("procrastinate", 3_000, PROCRASTINATE)):
            for each in every:
                print(name, each, round(measure(name, url, jobs, each).jobs_per_second), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
