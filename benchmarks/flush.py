"""The flusher beside the loop that people write: read, send, delete, one batch after another."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from uuid import uuid4

import grpc
import psutil
import psycopg
from sqlalchemy import Engine, make_url

from benchmarks.noop_service import noop_service
from benchmarks.setting import Results, engine, fill, server, tenants
from outbox_pipelines.ml_service import training_pb2, training_pb2_grpc
from outbox_pipelines.settings import Settings, load_settings
from outbox_pipelines.tenants.registry import Tenant
from outbox_pipelines.training.flusher import Flusher
from outbox_pipelines.training.grpc_sink import GrpcSink

ROUNDS = 5


def plain_loop(url: str, target: str, to_flush: Sequence[Tenant], batch: int) -> None:
    """Tenant by tenant: read a batch, send it, delete it with its ledger line, commit."""
    parts = make_url(url)
    with (
        psycopg.connect(f"host={parts.query['host']} dbname={parts.database} user={parts.username}") as connection,
        grpc.insecure_channel(target) as channel,
    ):
        train = training_pb2_grpc.TrainingStub(channel).TrainBatch  # type: ignore[no-untyped-call]
        for tenant in to_flush:
            table = f'"{tenant.schema}".ml_outbox'
            while True:
                rows = connection.execute(f"SELECT id, example::text FROM {table} ORDER BY id LIMIT {batch}").fetchall()
                connection.commit()
                if not rows:
                    break
                examples = [training_pb2.Example(id=row_id, json=example) for row_id, example in rows]
                train(training_pb2.TrainBatchRequest(tenant=str(tenant.tenant_id), batch_key="x", examples=examples))
                ids = [row_id for row_id, _ in rows]
                connection.execute(f"DELETE FROM {table} WHERE id = ANY (%s)", (ids,))
                connection.execute(
                    "INSERT INTO outbox.training_ledger (delivery_id, tenant_id, batch_key, run_id, row_ids, first_id,"
                    " last_id, call_seconds) VALUES (%s, %s, 'x', 'plain', %s, %s, %s, 0)",
                    (uuid4(), tenant.tenant_id, ids, ids[0], ids[-1]),
                )
                connection.commit()


def flusher(opened: Engine, settings: Settings, to_flush: Sequence[Tenant]) -> int:
    """Ours, until the outboxes are empty; gives the rows delivered."""
    sink = GrpcSink(settings)
    try:
        return Flusher(opened, sink, settings, run_id="benchmark").flush(to_flush, budget_seconds=3600).rows
    finally:
        sink.close()


def compare() -> None:
    """One and eight tenants at batch 10, one at batch 100; the median of several rounds, taken in turns."""
    results = Results(
        "flush", ("tenants", "batch", "rows", "plain loop, rows/s", "flusher, rows/s", "ratio", "wanted ratio")
    )
    with server() as url, engine(url) as opened, noop_service() as target:
        for count, batch, rows, wanted in ((1, 10, 10_000, 2.0), (8, 10, 2_000, 3.0), (1, 100, 50_000, 1.5)):
            # A turn is ten batches, as in the defaults.
            settings = load_settings(ml_target=target, batch_size=batch, max_rows_per_turn=10 * batch)
            chosen = tenants(opened, count, f"{count}x{batch}")
            total = count * rows
            speeds: dict[str, list[float]] = {"plain": [], "ours": []}
            for _ in range(ROUNDS):
                fill(opened, chosen, rows)
                speeds["plain"].append(_speed(total, lambda: plain_loop(url, target, chosen, batch)))  # noqa: B023
                fill(opened, chosen, rows)
                speeds["ours"].append(_speed(total, lambda: flusher(opened, settings, chosen)))  # noqa: B023
            plain, ours = (statistics.median(speeds[name]) for name in ("plain", "ours"))
            results.add(count, batch, total, round(plain), round(ours), round(ours / plain, 2), wanted)
    results.publish()


def _speed(rows: int, work: Callable[[], object]) -> float:
    gc.collect()
    began = time.perf_counter()
    work()
    return rows / (time.perf_counter() - began)


def memory(rows: int = 1_000_000) -> None:
    """Resident memory of this process while a million rows are drained."""
    results = Results("memory", ("rows", "MB at start", "MB at most", "MB more", "wanted at most", "rows/s"))
    with server() as url, engine(url) as opened, noop_service() as target:
        settings = load_settings(ml_target=target, batch_size=100, max_rows_per_turn=1_000)
        chosen = tenants(opened, 1, "memory")
        fill(opened, chosen, rows)
        process = psutil.Process()
        start = process.memory_info().rss
        peak = start

        class Watched(GrpcSink):
            def call_bytes(self, rows: Sequence) -> int:  # type: ignore[type-arg]
                nonlocal peak
                peak = max(peak, process.memory_info().rss)
                return super().call_bytes(rows)

        sink = Watched(settings)
        began = time.perf_counter()
        done = Flusher(opened, sink, settings, run_id="memory").flush(chosen, budget_seconds=3600).rows
        seconds = time.perf_counter() - began
        sink.close()
        mega = 1024 * 1024
        results.add(done, start // mega, peak // mega, (peak - start) // mega, 150, round(done / seconds))
    results.publish()
