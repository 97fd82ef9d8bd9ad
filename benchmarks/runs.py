"""What a Dagster run costs: Dagster's own launcher and storage, the pool, and warm runs, through the real daemon."""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import psycopg
import yaml
from sqlalchemy import make_url

from benchmarks.setting import Results, server
from outbox_pipelines.database.url import render

SMALL_BURST = 8
"""Runs of a burst for Dagster's own launcher: these take half a minute."""

BURST = 120
BURSTS = 5
"""For each case; the median counts, since other programs share the machine."""

STEADY_PER_SECOND = 4
STEADY_SECONDS = 30
_PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class Case:
    """How runs are executed."""

    name: str
    pooled: bool
    mode: str | None
    """Of warm runs; ``None`` for Dagster's own launcher."""

    @property
    def burst(self) -> int:
        return BURST if self.mode else SMALL_BURST


CASES = (
    Case("stock launcher, stock storage", pooled=False, mode=None),
    Case("stock launcher, pooled storage", pooled=True, mode=None),
    Case("fork, pooled storage", pooled=True, mode="fork"),
    Case("reuse, pooled storage", pooled=True, mode="reuse"),
)


@dataclass(frozen=True)
class Measured:
    """What runs cost."""

    runs_per_second: float
    """From the first launch to the last end."""

    launch_to_start: float
    tick_to_start: float
    commit_to_start: float
    """Medians in seconds; start is RUN_START, and a run's tick is when it was enqueued first in its batch."""

    daemon_cpu: float
    worker_cpu: float
    postgres_cpu: float
    """Seconds for each run."""

    sessions: float
    """Opened on Dagster's database, for each run."""


def compare(cases: Sequence[Case] = CASES) -> None:
    """Bursts for all cases, and a steady supply for warm runs."""
    columns = ["case", "supply", "runs", "runs/s", "launch to start, s", "tick to start, s", "commit to start, s"]
    columns += ["CPU-s per run: daemon", "worker", "PostgreSQL", "sessions per run"]
    results = Results("runs", columns)
    rates: dict[str, float] = {}
    with server() as url:
        for case in cases:
            with running(case, url) as bench:
                bench.supply(2)
                bursts = [
                    bench.measure(lambda bench=bench, case=case: bench.supply(case.burst), case.burst)  # type: ignore[misc]
                    for _ in range(BURSTS)
                ]
                burst = sorted(bursts, key=lambda one: one.runs_per_second)[BURSTS // 2]
                print(case.name, "bursts, runs/s:", [round(one.runs_per_second, 2) for one in bursts], flush=True)
                rates[case.name] = burst.runs_per_second
                _add(results, case, "burst", case.burst, burst)
                if case.mode:
                    count = STEADY_PER_SECOND * STEADY_SECONDS
                    _add(results, case, f"{STEADY_PER_SECOND}/s", count, bench.measure(bench.supply_steadily, count))
    results.publish()
    for case in cases[1:]:
        print(f"{case.name} / {cases[0].name}: {rates[case.name] / rates[cases[0].name]:.1f}")


def _add(results: Results, case: Case, supply: str, count: int, measured: Measured) -> None:
    results.add(
        case.name,
        supply,
        count,
        round(measured.runs_per_second, 2),
        round(measured.launch_to_start, 3),
        round(measured.tick_to_start, 2),
        round(measured.commit_to_start, 2),
        round(measured.daemon_cpu, 3),
        round(measured.worker_cpu, 3),
        round(measured.postgres_cpu, 3),
        round(measured.sessions, 1),
    )
    print(results.columns, results.rows[-1], flush=True)


@contextmanager
def running(case: Case, url: str) -> Iterator["Bench"]:
    """A daemon, its code server and, for warm runs, the launcher's process, on databases of their own."""
    number = CASES.index(case)
    dagster_url, work_url = (_new_database(url, f"{name}_{number}") for name in ("dagster", "work"))
    with psycopg.connect(work_url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE work (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
            "committed_at timestamptz NOT NULL DEFAULT clock_timestamp())"
        )
    with TemporaryDirectory(prefix="outbox-bench-") as folder:
        home = Path(folder)
        (home / "dagster.yaml").write_text(yaml.safe_dump(_instance(case, dagster_url)))
        environment = {**os.environ, "DAGSTER_HOME": folder, "BENCH_WORK_URL": work_url}
        processes = []
        try:
            if case.mode:
                processes.append(_start(home, environment, "launcher", "-m", "outbox_pipelines.launch"))
                _wait(lambda: "launcher: ready" in (home / "launcher.log").read_text(), "the launcher is ready")
            location = str(Path(__file__).with_name("runs_location.py"))
            processes.append(_start(home, environment, "daemon", "-m", "dagster._daemon", "run", "-f", location))
            bench = Bench(case, dagster_url, work_url, processes)
            bench.wait_for_a_tick()
            yield bench
        finally:
            for process in reversed(processes):
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()


def _instance(case: Case, dagster_url: str) -> Mapping[str, Any]:
    """The settings of dagster_home/dagster.yaml that matter here."""
    config = {"postgres_url": dagster_url}
    settings: dict[str, Any] = {
        "storage": {"custom": {"module": "outbox_pipelines.launch", "class": "PooledPostgresStorage", "config": config}}
        if case.pooled
        else {"postgres": {"postgres_url": config["postgres_url"].replace("postgresql://", "postgresql+psycopg2://")}},
        "compute_logs": {
            "module": "dagster._core.storage.noop_compute_log_manager",
            "class": "NoOpComputeLogManager",
        },
        "run_coordinator": {
            "module": "dagster.core.run_coordinator",
            "class": "QueuedRunCoordinator",
            "config": {"dequeue_interval_seconds": 1},
        },
        "concurrency": {"runs": {"max_concurrent_runs": 60 if case.mode else os.cpu_count()}},
        "sensors": {"use_threads": True, "num_workers": 4, "num_submit_workers": 4},
        "telemetry": {"enabled": False},
    }
    if case.mode:
        settings["run_launcher"] = {
            "module": "outbox_pipelines.launch",
            "class": "WarmRunLauncher",
            "config": {"mode": case.mode, "autostart": False},
        }
    return settings


def _new_database(url: str, name: str) -> str:
    with psycopg.connect(render(make_url(url).set(drivername="postgresql")), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return render(make_url(url).set(drivername="postgresql", database=name))


def _start(home: Path, environment: Mapping[str, str], name: str, *arguments: str) -> "subprocess.Popen[bytes]":
    with (home / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *arguments], env=environment, stdout=log, stderr=log, cwd=home
        )


def _wait(true: Callable[[], object], what: str) -> None:
    ends_at = time.monotonic() + _PATIENCE_SECONDS
    while not true():
        if time.monotonic() > ends_at:
            raise RuntimeError(f"not within {_PATIENCE_SECONDS:.0f} s: {what}")
        time.sleep(0.2)


class Bench:
    """A running case."""

    def __init__(
        self, case: Case, dagster_url: str, work_url: str, processes: Sequence["subprocess.Popen[bytes]"]
    ) -> None:
        self._dagster_url = dagster_url
        self._work_url = work_url
        self._daemon = psutil.Process(processes[-1].pid)
        self._launcher = psutil.Process(processes[0].pid) if case.mode else None

    def wait_for_a_tick(self) -> None:
        """Wait until the daemon has made its tables and looked at the sensor."""
        there = "SELECT count(*) FROM pg_tables WHERE tablename = 'job_ticks'"
        with psycopg.connect(self._dagster_url, autocommit=True) as connection:
            _wait(lambda: _number(connection, there), "the daemon has made its tables")
            _wait(lambda: _number(connection, "SELECT count(*) FROM job_ticks"), "the daemon has looked at the sensor")

    def supply(self, count: int) -> None:
        """Commit rows at once and wait until the run of each has ended."""
        with psycopg.connect(self._work_url, autocommit=True) as connection:
            connection.execute("INSERT INTO work (committed_at) SELECT now() FROM generate_series(1, %s)", (count,))
        self._wait_for_all()

    def supply_steadily(self) -> None:
        """Commit some rows each second for a while and wait until the run of each has ended."""
        with psycopg.connect(self._work_url, autocommit=True) as connection:
            began = time.monotonic()
            for number in range(STEADY_PER_SECOND * STEADY_SECONDS):
                time.sleep(max(0.0, began + number / STEADY_PER_SECOND - time.monotonic()))
                connection.execute("INSERT INTO work DEFAULT VALUES")
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        with psycopg.connect(self._work_url, autocommit=True) as connection:
            rows = _number(connection, "SELECT count(*) FROM work")
        with psycopg.connect(self._dagster_url, autocommit=True) as connection:
            ended = "SELECT count(*) FROM runs WHERE status IN ('SUCCESS', 'FAILURE', 'CANCELED')"
            _wait(lambda: _number(connection, ended) == rows, f"{rows} runs end")

    def measure(self, supply: Callable[[], None], count: int) -> Measured:
        """What the runs of ``supply`` cost, and how fast they are."""
        with (
            psycopg.connect(self._dagster_url, autocommit=True) as connection,
            psycopg.connect(self._work_url, autocommit=True) as work,
        ):
            time.sleep(2)  # what went before has reached the statistics
            last = _number(work, "SELECT coalesce(max(id), 0) FROM work")
            before = self._spent(connection)
            supply()
            time.sleep(2)
            spent = [(after - earlier) / count for after, earlier in zip(self._spent(connection), before, strict=True)]
            committed = dict(
                work.execute("SELECT id, extract(epoch FROM committed_at)::float8 FROM work WHERE id > %s", (last,))
            )
            runs = connection.execute(_RUNS, (last,)).fetchall()
        if len(runs) != count or any(instant is None for run in runs for instant in run):
            raise RuntimeError(f"{count} runs were asked for, and {len(runs)} are there; not all have succeeded")
        launched = min(run[2] for run in runs)
        return Measured(
            runs_per_second=count / (max(run[4] for run in runs) - launched),
            launch_to_start=statistics.median(start - launch for _, _, launch, start, _ in runs),
            tick_to_start=statistics.median(start - tick for _, tick, _, start, _ in runs),
            commit_to_start=statistics.median(start - committed[number] for number, _, _, start, _ in runs),
            daemon_cpu=spent[0],
            worker_cpu=spent[1],
            postgres_cpu=spent[2],
            sessions=spent[3],
        )

    def _spent(self, connection: "psycopg.Connection[Any]") -> list[float]:
        """CPU seconds of the daemon, of what executes for it, and of PostgreSQL; sessions of Dagster's database."""
        trees = list(self._daemon.children(recursive=True))
        if self._launcher is not None:
            trees += [self._launcher, *self._launcher.children(recursive=True)]
        backend = _number(connection, "SELECT pg_backend_pid()")
        postgres = psutil.Process(backend).parent()
        assert postgres is not None
        return [
            _cpu(self._daemon, reaped=False),
            sum(_cpu(process) for process in trees),
            sum(_cpu(process) for process in (postgres, *postgres.children())),
            _number(connection, "SELECT sessions FROM pg_stat_database WHERE datname = current_database()"),
        ]


_RUNS = """
    SELECT work.value::bigint AS number,
           extract(epoch FROM ticks.timestamp)::float8 AS tick,
           extract(epoch FROM min(events.timestamp) FILTER (WHERE event = 'PIPELINE_STARTING'))::float8 AS launch,
           extract(epoch FROM min(events.timestamp) FILTER (WHERE event = 'PIPELINE_START'))::float8 AS start,
           extract(epoch FROM min(events.timestamp) FILTER (WHERE event = 'PIPELINE_SUCCESS'))::float8 AS ended
    FROM run_tags AS work
    JOIN run_tags AS tick ON tick.run_id = work.run_id AND tick.key = 'dagster/tick'
    JOIN job_ticks AS ticks ON ticks.id = tick.value::bigint
    JOIN (SELECT run_id, timestamp, dagster_event_type AS event FROM event_logs) AS events
         ON events.run_id = work.run_id
    WHERE work.key = 'work' AND work.value::bigint > %s
    GROUP BY 1, 2
"""
"""Each run's row, and the instants of its tick, launch, RUN_START and RUN_SUCCESS, by the clocks of this machine."""


def _number(connection: "psycopg.Connection[Any]", query: str) -> int:
    row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0] or 0)


def _cpu(process: psutil.Process, *, reaped: bool = True) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    own = float(times.user + times.system)
    return own + float(times.children_user + times.children_system) if reaped else own
