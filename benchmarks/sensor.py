"""What one evaluation of the sensor costs the database, and loads by COPY."""

import statistics
import time
from collections.abc import Callable

from sqlalchemy import Engine, event

from benchmarks.setting import Results, engine, fill, server, tenants
from outbox_pipelines.training.backlog import look
from outbox_pipelines.training.enqueue import copy_training, enqueue_training


def evaluation() -> None:
    """1,000 tenants, 50 of them due."""
    results = Results("sensor", ("tenants", "due", "statements", "median, ms", "worst, ms", "wanted at most, ms"))
    with server() as url, engine(url) as opened:
        everyone = tenants(opened, 1_000, "sensor")
        fill(opened, everyone[::20], 100)
        times = []
        statements = 0
        for _ in range(20):
            statements, seconds = _database_time(opened, lambda: look(opened))
            times.append(seconds * 1000)
        due = len(look(opened).due)
        results.add(len(everyone), due, statements, round(statistics.median(times), 1), round(max(times), 1), 150)
    results.publish()


def enqueueing(rows: int = 50_000) -> None:
    """Rows enqueued in one transaction: INSERT and COPY."""
    results = Results("enqueue", ("way", "rows", "rows/s"))
    example = {"features": {"age": 12, "score": 0.5, "weight": 1.25}, "label": True}
    with server() as url, engine(url) as opened:
        (tenant,) = tenants(opened, 1, "enqueue")
        for way in (enqueue_training, copy_training):
            began = time.perf_counter()
            with opened.begin() as connection:
                way(connection, tenant, (example for _ in range(rows)))
            results.add(way.__name__, rows, round(rows / (time.perf_counter() - began)))
    results.publish()


def _database_time(opened: Engine, work: Callable[[], object]) -> tuple[int, float]:
    """How many statements ran, and the time spent between sending each and its answer."""
    began: list[float] = []
    spent: list[float] = []

    def before(*_: object) -> None:
        began.append(time.perf_counter())

    def after(*_: object) -> None:
        spent.append(time.perf_counter() - began[-1])

    event.listen(opened, "before_cursor_execute", before)
    event.listen(opened, "after_cursor_execute", after)
    try:
        work()
    finally:
        event.remove(opened, "before_cursor_execute", before)
        event.remove(opened, "after_cursor_execute", after)
    return len(spent), sum(spent)
