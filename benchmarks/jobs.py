"""The job outbox's worker beside other queues, and what does not depend on how much has been done before."""

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from uuid import uuid4

from sqlalchemy import Engine, text

from benchmarks import rivals
from benchmarks.rivals import Measured
from benchmarks.setting import Results, engine, server, settle_down
from outbox_pipelines.database.database import Database
from outbox_pipelines.jobs.context import JobContext
from outbox_pipelines.jobs.enqueue import NewJob, enqueue_job, enqueue_jobs
from outbox_pipelines.jobs.kinds import JobKind, Kinds
from outbox_pipelines.jobs.message import AttemptOutcome, Settlement
from outbox_pipelines.jobs.outbox import claim_due, settle
from outbox_pipelines.jobs.worker import Worker
from outbox_pipelines.settings import Settings, load_settings
from outbox_pipelines.upkeep.purge import COMPLETED_JOBS, Purged, purge

JOBS = 20_000
PROCRASTINATE_JOBS = 3_000
ROUNDS = 5
_CONSUMERS = 2


def compare() -> None:
    """`outbox worker`, pgqueuer and procrastinate: no-op jobs finished per second, in turns."""
    results = Results("jobs", ["queue", "settings", "jobs/s, median", "least", "most"])
    with server() as url:
        best = {
            "pgqueuer": rivals.pgqueuer(url, JOBS).settings,
            "procrastinate": rivals.procrastinate(url, PROCRASTINATE_JOBS).settings,
        }
        measured: dict[str, list[Measured]] = {"outbox worker": [], "pgqueuer": [], "procrastinate": []}
        for _ in range(ROUNDS):
            measured["outbox worker"].append(ours(url))
            measured["pgqueuer"].append(rivals.pgqueuer(url, JOBS, [best["pgqueuer"]]))
            measured["procrastinate"].append(rivals.procrastinate(url, PROCRASTINATE_JOBS, [best["procrastinate"]]))
    medians = {}
    for name, rounds in measured.items():
        rates = sorted(one.jobs_per_second for one in rounds)
        medians[name] = statistics.median(rates)
        settings = ", ".join(f"{key} {value}" for key, value in rounds[0].settings.items())
        results.add(name, settings, round(medians[name]), round(rates[0]), round(rates[-1]))
    results.publish()
    for name in ("pgqueuer", "procrastinate"):
        print(f"outbox worker / {name}: {medians['outbox worker'] / medians[name]:.2f}")


def ours(url: str) -> Measured:
    """A worker process with the default settings, from its first claim to its last completion."""
    with engine(url) as opened:
        with opened.begin() as connection:
            connection.execute(text("TRUNCATE outbox.messages, outbox.job_attempts, outbox.job_servers"))
            enqueue_jobs(connection, "no_op", [NewJob(payload={"n": number}) for number in range(JOBS)])
        settle_down(opened)
        subprocess.run([sys.executable, "-m", "benchmarks.jobs", url], check=True)
        with opened.connect() as connection:
            row = connection.execute(
                text("""
                    SELECT count(*) AS finished, count(DISTINCT ledger.message_id) AS in_ledger,
                           extract(epoch FROM max(completed_at) - min(claimed_at))::float8 AS seconds
                    FROM outbox.messages JOIN outbox.job_attempts AS ledger USING (message_id)
                    WHERE messages.outcome = 'succeeded'
                """)
            ).one()
    if not row.finished == row.in_ledger == JOBS:
        raise RuntimeError(f"the worker finished {row.finished} of {JOBS} jobs")
    prefetch = load_settings().worker_prefetch
    return Measured("outbox worker", {"consumers": _CONSUMERS, "prefetch": prefetch}, JOBS / row.seconds)


def no_op(_job: JobContext) -> None:
    """A handler that does nothing."""


def serve(url: str) -> None:
    """A worker, until nothing is left."""
    settings = load_settings(database_url=url)
    kinds = Kinds([JobKind("no_op", no_op, consumers=_CONSUMERS)])
    left = text("SELECT EXISTS (SELECT FROM outbox.messages WHERE state <> 'Completed')")
    with Database(settings) as database, Worker(database, kinds, settings):
        while True:
            time.sleep(0.1)
            with database.engine.connect() as connection:
                if not connection.execute(left).scalar_one():
                    return


def latency() -> None:
    """From an application's commit to the handler's first line, with an idle worker."""
    results = Results("latency", ["jobs", "median, ms", "95 %, ms", "worst, ms"])
    began = threading.Event()
    at = [0.0]

    def stamp(_job: JobContext) -> None:
        at[0] = time.monotonic()
        began.set()

    with server() as url, engine(url) as opened:
        settings = load_settings(database_url=url)
        with Database(settings) as database, Worker(database, Kinds([JobKind("stamp", stamp)]), settings):
            waits = []
            for number in range(220):
                began.clear()
                with opened.begin() as connection:
                    enqueue_job(connection, "stamp")
                committed = time.monotonic()
                if not began.wait(10):
                    raise RuntimeError("the worker did not begin the job within 10 s")
                if number >= 20:
                    waits.append((at[0] - committed) * 1000)
                # Idle again, in the middle of nothing.
                time.sleep(0.03)
    waits.sort()
    results.add(len(waits), *(round(value, 1) for value in (statistics.median(waits), waits[190], waits[-1])))
    results.publish()


def enqueueing() -> None:
    """`enqueue_jobs`, 50,000 jobs in one call."""
    results = Results("enqueue_jobs", ["jobs", "jobs/s"])
    jobs = [NewJob(job_id=number, payload={"term": "2027-1", "n": number}) for number in range(50_000)]
    with server() as url, engine(url) as opened:
        rates = []
        for _ in range(ROUNDS):
            began = time.monotonic()
            with opened.begin() as connection:
                enqueue_jobs(connection, "no_op", jobs)
            rates.append(len(jobs) / (time.monotonic() - began))
    results.add(len(jobs), round(statistics.median(rates)))
    results.publish()


def claiming() -> None:
    """The time to claim and to settle a batch, with no completed rows and with a million, in turns."""
    results = Results("claim", ["completed rows", "claim of 100, ms", "claim of 1, ms", "settling 100, ms"])
    rows = []
    for completed in (0, 1_000_000):
        with _filled(completed) as opened:
            hundred, settled = _claim_times(opened, 100)
            one, _ = _claim_times(opened, 1)
            rows.append((hundred, one, settled))
            results.add(completed, *(round(seconds * 1000, 2) for seconds in rows[-1]))
    results.publish()
    print("with a million / with none: " + ", ".join(f"{many / none:.2f}" for none, many in zip(*rows, strict=True)))


def purging() -> None:
    """Rows that a purge deletes in a second, and what it costs those who claim meanwhile, in turns."""
    results = Results("purge", ["claims meanwhile", "rows purged", "rows/s", "claim of 1, ms"])
    old = 200_000
    purges, rates = [], []
    for claims in (False, True):
        with _filled(old, days=15) as opened:
            alone, _ = _claim_times(opened, 1) if claims else (0.0, 0.0)
            with ThreadPoolExecutor(1) as beside:
                purged = beside.submit(_purge, opened.url.render_as_string(hide_password=False))
                during = []
                while claims and not purged.done():
                    during.append(_claim_times(opened, 1, times=20)[0])
                done = purged.result()
            if done.rows != old:
                raise RuntimeError(f"{done.rows} of {old} rows were purged")
            rates.append(done.rows / done.seconds)
            results.add(
                claims, done.rows, round(rates[-1]), round(statistics.median(during) * 1000, 2) if during else ""
            )
            if claims:
                results.add("the claims alone", 0, 0, round(alone * 1000, 2))
                purges.append(statistics.median(during) / alone)
    results.publish()
    print(f"a claim beside a purge / alone: {purges[0]:.2f}; purge beside claims: {rates[1]:,.0f} rows/s")


def _purge(url: str) -> Purged:
    with engine(url) as opened:
        with opened.connect() as connection:
            before = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
        return purge(
            opened, COMPLETED_JOBS, since=None, before=before - timedelta(days=14), pause=Settings().purge_pause_seconds
        )


@contextmanager
def _filled(completed: int, *, days: int = 0) -> Iterator[Engine]:
    with server() as url, engine(url) as opened:
        with opened.begin() as connection:
            connection.execute(
                text("""
                    INSERT INTO outbox.messages
                           (kind, job_id, state, outcome, completed_at, claims, processing_attempts)
                    SELECT 'no_op', n::text, 'Completed', 'succeeded',
                           now() - make_interval(days => :days, secs => n), 1, 1
                    FROM generate_series(1, :completed) AS n
                """),
                {"completed": completed, "days": days},
            )
            enqueue_jobs(connection, "no_op", [NewJob(job_id=number) for number in range(30_000)])
        settle_down(opened)
        yield opened


def _claim_times(opened: Engine, limit: int, *, times: int = 120) -> tuple[float, float]:
    kind = JobKind("no_op", no_op)
    claims, settles = [], []
    for _ in range(times):
        began = time.monotonic()
        with opened.begin() as connection:
            taken = claim_due(
                connection,
                kind.name,
                limit=limit,
                ready=1,
                alone=True,
                attempts=kind.attempts,
                holder="benchmark",
                seconds=kind.lease,
                token=uuid4(),
            )
        claims.append(time.monotonic() - began)
        if len(taken) != limit:
            raise RuntimeError(f"claimed {len(taken)} of {limit}")
        began = time.monotonic()
        with opened.begin() as connection:
            settle(connection, [Settlement(one, AttemptOutcome.SUCCEEDED) for one in taken], holder="benchmark")
        settles.append(time.monotonic() - began)
    return statistics.median(claims), statistics.median(settles)


if __name__ == "__main__":
    serve(sys.argv[1])
