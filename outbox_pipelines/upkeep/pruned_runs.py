"""Which runs were pruned from Dagster's history: the ledgers outlive them."""

from collections.abc import Sequence

from sqlalchemy import Connection, text


def note_pruned(connection: Connection, run_ids: Sequence[str]) -> None:
    """Note that these runs are gone from Dagster's history; the caller commits."""
    connection.execute(
        text("INSERT INTO outbox.pruned_runs (run_id) SELECT unnest(CAST(:ids AS text[])) ON CONFLICT DO NOTHING"),
        {"ids": list(run_ids)},
    )


def forget_pruned(connection: Connection, *, days: float) -> int:
    """Forget those that were pruned longer ago; the caller commits."""
    done = connection.execute(
        text("DELETE FROM outbox.pruned_runs WHERE pruned_at < clock_timestamp() - make_interval(secs => :age)"),
        {"age": days * 86_400},
    )
    return int(done.rowcount)
