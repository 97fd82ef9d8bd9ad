"""The demonstration: five tenants' real training rows leave their outboxes, jobs are done, and the proof.

The proof: a model trained through the outbox (rows, sensor, runs, gRPC, service) gives bit
for bit the same predictions as the same model trained directly on the accepted rows in
order; the ledger covers every id exactly once; the outboxes are empty.
"""

import csv
import gzip
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import as_file, files
from typing import Any

import grpc
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from outbox_pipelines.database.engine import describe
from outbox_pipelines.database.quoting import driver_identifier
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.local.demo_checks import execute_checks
from outbox_pipelines.local.demo_jobs import KindCounts, count_jobs, prove_jobs
from outbox_pipelines.local.stack import Stack
from outbox_pipelines.ml_service import training_pb2, training_pb2_grpc
from outbox_pipelines.ml_service.model import OnlineModel, parse_example, parse_features
from outbox_pipelines.tenants.registry import Tenant, UnknownTenant, add_tenant, list_tenants, remove_tenant
from outbox_pipelines.training.enqueue import enqueue_training
from outbox_pipelines.wording import counted

TENANT_NAMES = ("demo-ash", "demo-birch", "demo-cedar", "demo-elm", "demo-fir")
DRAIN_SECONDS = 600.0
_POLL_SECONDS = 0.5

# The service must refuse these: a label that is neither true nor false, a feature that is no number.
_REFUSED: dict[str, dict[str, Any]] = {
    "demo-birch": {"features": {"https": 1.0}, "label": "perhaps"},
    "demo-elm": {"features": {"https": "yes"}, "label": True},
}


@dataclass(frozen=True)
class DemoTenant:
    """A tenant of the demonstration and what was enqueued for it."""

    tenant: Tenant
    accepted: dict[int, str]
    """Row id to JSON text, for the rows that the service must learn from."""

    refused: set[int]


@dataclass(frozen=True)
class TenantCounts:
    """Where a tenant's rows are at one moment."""

    name: str
    waiting: int
    delivered: int
    dead_lettered: int
    runs: int
    last_delivery: datetime | None


@dataclass(frozen=True)
class Proof:
    """What the demonstration found."""

    tenants: int
    enqueued: int
    delivered: int
    dead_lettered: int
    pending: int
    duplicates: int
    """Ids that the ledger lists more than once."""

    runs: int
    """Flush runs."""

    jobs: int
    jobs_succeeded: int
    jobs_given_up: int
    job_attempts: int
    checks_passed: int
    """Checks of the backlog assets that passed after all was done."""

    seconds: float
    flaws: list[str]
    """Where the proof does not hold; empty when it does."""

    def as_dict(self) -> dict[str, object]:
        """For ``--json``."""
        values = {key: value for key, value in vars(self).items() if key != "flaws"}
        values["seconds"] = round(self.seconds, 1)
        return {**values, "verified": not self.flaws, **({"flaws": self.flaws} if self.flaws else {})}


def refuse_foreign_tenants(engine: Engine) -> None:
    """The demonstration delivers to a service of its own, so nobody else's rows may be there.

    Raises:
        OutboxError: naming a tenant that is not the demonstration's.
    """
    with engine.connect() as connection:
        names = [entry.tenant.name for entry in list_tenants(connection)]
    foreign = [name for name in names if name not in TENANT_NAMES]
    if foreign:
        raise OutboxError(
            f"tenant {foreign[0]!r} is registered in {describe(engine)}, and the demo would send its rows to a "
            "service that is thrown away: run it without OUTBOX_DATABASE_URL, or with another OUTBOX_HOME"
        )


def prepare(engine: Engine) -> list[DemoTenant]:
    """Make the five tenants anew and enqueue their rows, each tenant's in one transaction."""
    examples = list(_phishing_examples())
    share = len(examples) // len(TENANT_NAMES)
    prepared = []
    for place, name in enumerate(TENANT_NAMES):
        mine = examples[place * share : (place + 1) * share]
        with Session(engine) as session, session.begin():
            _remove_earlier(session.connection(), name)
            tenant = add_tenant(session.connection(), name)
            batch = list(mine)
            if name in _REFUSED:
                # In the middle, where it would stop a loop that cannot go around it.
                batch.insert(share // 2, _REFUSED[name])
            ids = enqueue_training(session, tenant, batch)
        refused = {row_id for row_id, example in zip(ids, batch, strict=True) if example is _REFUSED.get(name)}
        accepted = {
            row_id: json.dumps(example) for row_id, example in zip(ids, batch, strict=True) if row_id not in refused
        }
        prepared.append(DemoTenant(tenant, accepted, refused))
    return prepared


def _remove_earlier(connection: Connection, name: str) -> None:
    try:
        remove_tenant(connection, name, drop_schema=True, force=True)
    except UnknownTenant:
        return


def _phishing_examples() -> Iterator[dict[str, Any]]:
    """The 1,250 rows of the Phishing data set that the river package ships."""
    source = files("river.datasets").joinpath("phishing.csv.gz")
    with as_file(source) as path, gzip.open(path, "rt", newline="") as lines:
        for row in csv.DictReader(lines):
            label = row.pop("is_phishing") == "1"
            yield {"features": {name: float(value) for name, value in row.items()}, "label": label}


def count(engine: Engine, prepared: Sequence[DemoTenant]) -> list[TenantCounts]:
    """Where the rows are now."""
    counts = []
    with engine.connect() as connection:
        for entry in prepared:
            schema = driver_identifier(entry.tenant.schema)
            waiting, dead = connection.exec_driver_sql(
                f"SELECT (SELECT count(*) FROM {schema}.ml_outbox), (SELECT count(*) FROM {schema}.ml_outbox_dead)"
            ).one()
            ledger = connection.execute(
                text("""
                    SELECT coalesce(sum(cardinality(row_ids)), 0) AS delivered, count(DISTINCT run_id) AS runs,
                           max(delivered_at) AS last
                    FROM outbox.training_ledger WHERE tenant_id = :tenant
                """),
                {"tenant": entry.tenant.tenant_id},
            ).one()
            counts.append(
                TenantCounts(entry.tenant.name, waiting, int(ledger.delivered), dead, ledger.runs, ledger.last)
            )
    return counts


Show = Callable[[list[TenantCounts], list[KindCounts]], None]


def watch(stack: Stack, prepared: Sequence[DemoTenant], jobs: dict[int, str], show: Show) -> None:
    """Show the counts until every outbox is empty and every job completed.

    Raises:
        OutboxError: when a process ended, or something is left after ten minutes.
    """
    ends_at = time.monotonic() + DRAIN_SECONDS
    while True:
        counts = count(stack.database.engine, prepared)
        kinds = count_jobs(stack.database.engine, jobs)
        show(counts, kinds)
        left = sum(entry.waiting for entry in counts)
        unfinished = sum(entry.waiting + entry.running for entry in kinds)
        if left == unfinished == 0:
            return
        stack.check()
        if time.monotonic() > ends_at:
            logs = ", ".join(str(component.log) for component in stack.components)
            raise OutboxError(
                f"{counted(left, 'row')} and {counted(unfinished, 'job')} still wait after {DRAIN_SECONDS:.0f} s; "
                f"see {stack.ui_url} and {logs}"
            )
        time.sleep(_POLL_SECONDS)


def prove(stack: Stack, prepared: Sequence[DemoTenant], jobs: dict[int, str], *, seconds: float) -> Proof:
    """Compare the models, the ledgers, the outboxes and the jobs' end states with what was enqueued.

    And execute the checks of the backlog assets.
    """
    checked = execute_checks(stack)
    proved = prove_jobs(stack.database.engine, jobs)
    counts = count(stack.database.engine, prepared)
    flaws: list[str] = []
    duplicates = 0
    with stack.database.engine.connect() as connection, _predictor(stack.settings.ml_target) as predict:
        runs: set[str] = set()
        for entry in prepared:
            delivered = (
                connection.execute(
                    text("SELECT unnest(row_ids) FROM outbox.training_ledger WHERE tenant_id = :id"),
                    {"id": entry.tenant.tenant_id},
                )
                .scalars()
                .all()
            )
            runs.update(
                connection.execute(
                    text("SELECT DISTINCT run_id FROM outbox.training_ledger WHERE tenant_id = :id"),
                    {"id": entry.tenant.tenant_id},
                ).scalars()
            )
            dead = connection.exec_driver_sql(
                f"SELECT id FROM {driver_identifier(entry.tenant.schema)}.ml_outbox_dead"
            ).scalars()
            duplicates += len(delivered) - len(set(delivered))
            flaws += _compare_ids(entry, list(delivered), set(dead))
            flaws += _compare_models(entry, predict)
    pending = sum(entry.waiting for entry in counts)
    if pending:
        flaws.append(f"{pending} rows are left in the outboxes")
    return Proof(
        tenants=len(prepared),
        enqueued=sum(len(entry.accepted) + len(entry.refused) for entry in prepared),
        delivered=sum(entry.delivered for entry in counts),
        dead_lettered=sum(entry.dead_lettered for entry in counts),
        pending=pending,
        duplicates=duplicates,
        runs=len(runs),
        jobs=proved.jobs,
        jobs_succeeded=proved.succeeded,
        jobs_given_up=proved.given_up,
        job_attempts=proved.attempts,
        checks_passed=checked.passed,
        seconds=seconds,
        flaws=flaws + proved.flaws + checked.flaws,
    )


def _compare_ids(entry: DemoTenant, delivered: list[int], dead: set[int]) -> list[str]:
    flaws = []
    name = entry.tenant.name
    if sorted(delivered) != sorted(entry.accepted):
        missing = sorted(set(entry.accepted) - set(delivered))[:5]
        more = sorted(set(delivered) - set(entry.accepted))[:5]
        flaws.append(f"{name}: the ledger does not list every accepted id once (missing {missing}, foreign {more})")
    if dead != entry.refused:
        flaws.append(f"{name}: the dead letters are {sorted(dead)[:5]}, expected {sorted(entry.refused)}")
    return flaws


def _compare_models(entry: DemoTenant, predict: "Callable[[Tenant, list[str]], list[float]]") -> list[str]:
    direct = OnlineModel()
    for row_id in sorted(entry.accepted):
        direct.learn(parse_example(entry.accepted[row_id]))
    features = [json.dumps(json.loads(text)["features"]) for text in entry.accepted.values()]
    expected = [direct.probability(parse_features(one)) for one in features]
    differing = [
        place
        for place, (mine, theirs) in enumerate(zip(expected, predict(entry.tenant, features), strict=True))
        if mine.hex() != theirs.hex()
    ]
    if differing:
        return [f"{entry.tenant.name}: {len(differing)} of {len(expected)} predictions differ from direct training"]
    return []


@contextmanager
def _predictor(target: str) -> Iterator[Callable[[Tenant, list[str]], list[float]]]:
    with grpc.insecure_channel(target) as channel:
        stub = training_pb2_grpc.TrainingStub(channel)  # type: ignore[no-untyped-call]  # generated

        def predict(tenant: Tenant, features: list[str]) -> list[float]:
            request = training_pb2.PredictRequest(tenant=str(tenant.tenant_id), features=features)
            return list(stub.Predict(request, timeout=60).probabilities)

        yield predict
