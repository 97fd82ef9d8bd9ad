"""Opens runs for due messages, and takes those back that no run came for."""

from dataclasses import dataclass
from uuid import uuid4

from sqlalchemy import Connection, Engine, text

from outbox_pipelines.database.totals import add_sql, bucket_sql
from outbox_pipelines.jobs.kinds import JobKind
from outbox_pipelines.jobs.message import State
from outbox_pipelines.jobs.transport import Fate, Published, Runs, Served
from outbox_pipelines.lease.backoff import backoff_seconds

PUBLISHED = "published"
"""The metric of publishes: how many, and how long their messages had been due."""

_FIRST_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 300.0
"""Between publishes of a message whose runs end without claiming it, a broken code location's for example."""


@dataclass(frozen=True)
class Polled:
    """What a poll of a kind did."""

    published: int
    confirmed: int
    taken_back: int
    """Publishes that came to nothing: their messages wait again."""


class Publisher:
    """Publishes messages of a kind for runs, at most as many as places are free.

    Args:
        engine: the database.
        runs: where runs are asked for.
        timeout: seconds after which a run that nobody has seen is not waited for any more.
    """

    def __init__(self, engine: Engine, runs: Runs, *, timeout: float) -> None:
        self._engine = engine
        self._runs = runs
        self._timeout = timeout

    def poll(self, kind: JobKind) -> Polled:
        """Confirm, then publish. Three short transactions; none is open while runs are looked up."""
        confirmed, taken_back = self._confirm(kind)
        with self._engine.begin() as connection:
            published = publish(connection, kind)
        if published:
            self._runs.request(published)
        return Polled(len(published), confirmed, taken_back)

    def _confirm(self, kind: JobKind) -> tuple[int, int]:
        with self._engine.connect() as connection:
            waiting = connection.execute(
                text("""
                    SELECT message_id, publish_attempts, processing_attempts, claims, publish_token, state,
                           published_at < clock_timestamp() - make_interval(secs => :timeout) AS overdue
                    FROM outbox.messages WHERE kind = :kind AND state IN ('Publishing', 'Published')
                """),
                {"kind": kind.name, "timeout": self._timeout},
            ).all()
        if not waiting:
            return 0, 0
        asked = [
            Published(row.message_id, row.publish_attempts, row.processing_attempts + 1, row.publish_token)
            for row in waiting
        ]
        fates = self._runs.fates(asked)
        arrived, gone = [], []
        for row, one in zip(waiting, asked, strict=True):
            fate = fates.get(one.run_key, Fate.UNSEEN)
            # How many publishes of the message nobody claimed; a worker's claims were not published.
            lost = max(1, row.publish_attempts - row.claims)
            if fate is Fate.ON_ITS_WAY and row.state == State.PUBLISHING:
                arrived.append(one)
            elif fate is Fate.ENDED:
                gone.append((one, f"run {one.run_key} ended without claiming it; see that run", lost))
            elif fate is Fate.UNSEEN and row.overdue:
                gone.append((one, f"no run {one.run_key} came within {self._timeout:g} s", lost))
        with self._engine.begin() as connection:
            _take_turns(connection, kind)
            confirmed = confirm(connection, arrived)
            taken_back = sum(take_back(connection, one, reason, lost=lost) for one, reason, lost in gone)
        return confirmed, taken_back


def places(connection: Connection, kind: str) -> tuple[int, int]:
    """How many messages of a kind are due (at most a thousand are counted), and how many are in flight."""
    row = connection.execute(
        text("""
            SELECT (SELECT count(*) FROM (
                        SELECT FROM outbox.messages
                        WHERE kind = :kind AND state = 'Pending' AND available_at <= statement_timestamp() LIMIT 1000
                    ) AS due) AS due,
                   (SELECT count(*) FROM outbox.messages
                    WHERE kind = :kind AND state IN ('Publishing', 'Published', 'Processing')) AS in_flight
        """),
        {"kind": kind},
    ).one()
    return row.due, row.in_flight


def served_by_runs(connection: Connection, kind: JobKind) -> Served:
    """What the runs of a kind are doing: how many work, and since when none of them has got on.

    A run gets on when it claims; with none at work there is nothing to get on with.
    """
    row = connection.execute(
        text("""
            SELECT count(*) AS running,
                   coalesce(extract(epoch FROM clock_timestamp() - max(claimed_at)), 0)::float8 AS age
            FROM outbox.messages
            WHERE kind = :kind AND state = 'Processing' AND lease_holder NOT LIKE 'worker-%'
        """),
        {"kind": kind.name},
    ).one()
    return Served(kind.name, kind.consumers, running=row.running, progress_age=max(row.age, 0.0))


# By the kind and how long they had been due. Only the kind's publisher, whose turn it is, writes these rows.
_COUNT = add_sql(f"""
    SELECT '{PUBLISHED}', :kind, '', {bucket_sql("waited")}, count(*), sum(greatest(0, waited))
    FROM published GROUP BY 4
""")


def publish(connection: Connection, kind: JobKind) -> list[Published]:
    """Reserve the most urgent due messages for runs: Pending to Publishing, as many as places are free.

    Publishers of a kind take turns (an advisory lock of the transaction), or two would both see
    the same places free. The messages themselves are protected by SKIP LOCKED and their state.
    """
    token = uuid4()
    _take_turns(connection, kind)
    rows = connection.execute(
        text(f"""
            WITH due AS MATERIALIZED (
                SELECT message_id FROM outbox.messages
                WHERE kind = :kind AND state = 'Pending' AND available_at <= statement_timestamp()
                ORDER BY priority DESC, available_at, message_id
                LIMIT greatest(0, :consumers - (
                    SELECT count(*) FROM outbox.messages
                    WHERE kind = :kind AND state IN ('Publishing', 'Published', 'Processing')
                ))
                FOR UPDATE SKIP LOCKED
            ), published AS (
                UPDATE outbox.messages AS message
                SET state = 'Publishing', publish_token = :token, publish_attempts = publish_attempts + 1,
                    published_at = clock_timestamp(), parked = false
                FROM due WHERE message.message_id = due.message_id
                RETURNING message.message_id, publish_attempts, processing_attempts, priority, available_at,
                          extract(epoch FROM published_at - available_at) AS waited
            ), counted AS ({_COUNT})
            SELECT * FROM published
        """),
        {"kind": kind.name, "consumers": kind.consumers, "token": token},
    ).all()
    ordered = sorted(rows, key=lambda row: (-row.priority, row.available_at, row.message_id))
    return [Published(row.message_id, row.publish_attempts, row.processing_attempts + 1, token) for row in ordered]


def _take_turns(connection: Connection, kind: JobKind) -> None:
    connection.execute(
        text("SELECT pg_advisory_xact_lock(hashtext('outbox_pipelines publish'), hashtext(:kind))"),
        {"kind": kind.name},
    )


def confirm(connection: Connection, arrived: list[Published]) -> int:
    """Publishing to Published: their runs have been seen. Says how many were still waiting for that."""
    if not arrived:
        return 0
    done = connection.execute(
        text("""
            UPDATE outbox.messages AS message SET state = 'Published'
            FROM unnest(CAST(:ids AS bigint[]), CAST(:tokens AS uuid[])) AS seen (id, token)
            WHERE message.message_id = seen.id AND message.publish_token = seen.token AND state = 'Publishing'
        """),
        {"ids": [one.message_id for one in arrived], "tokens": [one.token for one in arrived]},
    )
    return int(done.rowcount)


def take_back(connection: Connection, one: Published, reason: str, *, lost: int) -> bool:
    """Publishing or Published to Pending, after a pause that grows with the publishes that were lost:
    its run is not going to claim it."""
    pause = backoff_seconds(lost, first=_FIRST_PAUSE_SECONDS, maximum=_LONGEST_PAUSE_SECONDS)
    done = connection.execute(
        text("""
            UPDATE outbox.messages
            SET state = 'Pending', publish_token = NULL, last_error = :reason,
                available_at = clock_timestamp() + make_interval(secs => :pause)
            WHERE message_id = :id AND publish_token = :token AND state IN ('Publishing', 'Published')
        """),
        {"id": one.message_id, "token": one.token, "reason": reason, "pause": pause},
    )
    return bool(done.rowcount)
