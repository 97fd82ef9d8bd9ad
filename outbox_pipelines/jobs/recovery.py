"""Brings back what was lost: claims of dead workers, publishes that came to nothing, orphans."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from outbox_pipelines.database.error_text import first_line
from outbox_pipelines.database.progress import forget
from outbox_pipelines.jobs.kinds import JobKind, Kinds
from outbox_pipelines.jobs.outbox import EXPIRED_AT_ONCE, expire
from outbox_pipelines.jobs.transport import Served
from outbox_pipelines.wording import counted

_logger = logging.getLogger(__name__)

_PARKED_AT_ONCE = 1_000
_REMEMBERED = "1 day"
"""How long a kind counts as registered after the last code location or worker that serves it was seen."""


@dataclass
class Recovered:
    """What a recovery did."""

    lost_leases: int = 0
    lost_publishes: int = 0
    parked: int = 0
    """Messages newly found to be of a kind that nobody has registered."""

    orphans: int = 0
    """Domain jobs that had no message and were given one."""

    problems: list[str] = field(default_factory=list)
    """What could not be looked at, with the reason; everything else was done."""

    def words(self) -> str:
        """The facts in one line."""
        facts = [
            f"{counted(count, what)} {done}"
            for count, what, done in (
                (self.lost_leases, "lost lease", "recovered"),
                (self.lost_publishes, "lost publish", "taken back"),
                (self.parked, "message", "parked: nobody has registered their kind"),
                (self.orphans, "orphan", "given a message"),
            )
            if count
        ]
        return "; ".join(facts + self.problems) or "nothing to recover"


def recover(engine: Engine, kinds: Kinds, *, publish_timeout: float, also_published: bool = False) -> Recovered:
    """Bring back lost claims and publishes, and park what nobody serves. A few short transactions.

    Args:
        engine: the database.
        kinds: those registered here.
        publish_timeout: seconds after which a publish that nobody confirmed is taken back.
        also_published: take Published messages of these kinds back as well after that time. For
            a worker, which cannot know whether their runs still come; one that does finds its
            message taken, and ends well.
    """
    done = Recovered()
    while True:
        with engine.begin() as connection:
            expired = len(expire(connection))
        done.lost_leases += expired
        if expired < EXPIRED_AT_ONCE:
            break
    with engine.begin() as connection:
        done.lost_publishes = _take_back(connection, list(kinds), publish_timeout, also_published)
        done.parked = _park(connection, list(kinds))
    return done


def recover_orphans(engine: Engine, kinds: Iterable[JobKind]) -> Recovered:
    """Give each live domain job without a message one; for the start of a process.

    A kind whose table cannot be read is told of, and the others are served.
    """
    done = Recovered()
    for kind in kinds:
        if kind.domain is None:
            continue
        try:
            with engine.begin() as connection:
                done.orphans += _enqueue_orphans(connection, kind)
        except Exception as error:  # a user's adapter or table may do anything, and is not the other kinds' trouble
            reason = first_line(getattr(error, "orig", None) or error)
            done.problems.append(f"kind {kind.name}: its domain jobs cannot be listed: {reason}")
    return done


def sensor_name(kind: str) -> str:
    """The name of the sensor that polls for a kind, which is also the name of that task."""
    return f"{kind}_sensor"


def note_served(connection: Connection, server: str, served: Iterable[Served], *, listening: bool = False) -> None:
    """Note who serves which kinds and how it gets on, by the database's clock.

    Args:
        connection: the caller commits.
        server: a code location or a worker's process.
        served: its kinds.
        listening: whether it waits for notifications of new messages.
    """
    kinds = sorted(served, key=lambda one: one.kind)
    connection.execute(
        text("""
            INSERT INTO outbox.job_servers AS known
                   (kind, server, listening, consumers, running, prefetched, progressed_at, seen_at)
            SELECT kind, :server, :listening, consumers, running, prefetched,
                   clock_timestamp() - make_interval(secs => age), clock_timestamp()
            FROM unnest(CAST(:kinds AS text[]), CAST(:consumers AS integer[]), CAST(:running AS integer[]),
                        CAST(:prefetched AS integer[]), CAST(:ages AS float8[]))
                 AS served (kind, consumers, running, prefetched, age)
            ON CONFLICT (kind, server) DO UPDATE
            SET listening = excluded.listening, consumers = excluded.consumers, running = excluded.running,
                prefetched = excluded.prefetched, seen_at = excluded.seen_at,
                progressed_at = greatest(known.progressed_at, excluded.progressed_at)
        """),
        {
            "server": server,
            "listening": listening,
            "kinds": [one.kind for one in kinds],
            "consumers": [one.consumers for one in kinds],
            "running": [one.running for one in kinds],
            "prefetched": [one.prefetched for one in kinds],
            # A list of one type: the driver refuses 0 beside 0.5.
            "ages": [float(one.progress_age) for one in kinds],
        },
    )


def forget_server(engine: Engine, server: str) -> None:
    """A worker has ended: it listens no more. That its kinds are registered is remembered for a day."""
    try:
        with engine.begin() as connection:
            connection.execute(
                text("""
                    UPDATE outbox.job_servers SET listening = false, consumers = 0, running = 0, prefetched = 0
                    WHERE server = :server
                """),
                {"server": server},
            )
    except SQLAlchemyError as error:
        _logger.warning("the end of %s could not be noted: %s", server, type(error).__name__)


def _take_back(connection: Connection, kinds: list[str], timeout: float, also_published: bool) -> int:
    done = connection.execute(
        text("""
            WITH lost AS (
                SELECT message_id FROM outbox.messages
                WHERE state IN ('Publishing', 'Published')
                  AND (state = 'Publishing' OR (:also_published AND kind = ANY (:kinds)))
                  AND published_at < clock_timestamp() - make_interval(secs => :timeout)
                FOR UPDATE SKIP LOCKED
            )
            UPDATE outbox.messages AS message
            SET state = 'Pending', publish_token = NULL,
                last_error = 'not claimed within ' || :timeout || ' s of publishing'
            FROM lost WHERE message.message_id = lost.message_id
        """),
        {"timeout": timeout, "also_published": also_published, "kinds": kinds},
    )
    return int(done.rowcount)


def _park(connection: Connection, served: list[str]) -> int:
    """Say why messages of unregistered kinds wait, a thousand at a time, and unsay it where they are served.

    Only words: a claim of a registered kind pays no heed to them. The kinds that wait are found
    by jumping from one to the next along the index of due messages.
    """
    gone = connection.execute(
        text("""
            WITH gone AS (
                DELETE FROM outbox.job_servers WHERE seen_at < clock_timestamp() - CAST(:remembered AS interval)
                RETURNING kind, server
            )
            SELECT kind FROM gone
            WHERE NOT EXISTS (
                SELECT FROM outbox.job_servers AS left_over
                WHERE left_over.kind = gone.kind AND (kind, server) NOT IN (SELECT kind, server FROM gone)
            )
        """),
        {"remembered": _REMEMBERED},
    )
    forget(connection, [sensor_name(kind) for kind in gone.scalars()])
    connection.execute(
        text("""
            UPDATE outbox.messages SET parked = false, last_error = NULL
            WHERE message_id IN (
                SELECT message_id FROM outbox.messages
                WHERE parked AND kind IN (SELECT kind FROM outbox.job_servers) LIMIT :limit FOR UPDATE SKIP LOCKED
            )
        """),
        {"limit": _PARKED_AT_ONCE},
    )
    done = connection.execute(
        text("""
            WITH RECURSIVE waiting AS (
                (SELECT kind FROM outbox.messages WHERE state = 'Pending' ORDER BY kind LIMIT 1)
                UNION ALL
                SELECT (SELECT message.kind FROM outbox.messages AS message
                        WHERE message.state = 'Pending' AND message.kind > waiting.kind
                        ORDER BY message.kind LIMIT 1)
                FROM waiting WHERE waiting.kind IS NOT NULL
            ), unknown AS (
                SELECT kind FROM waiting
                WHERE kind <> ALL (:served) AND kind NOT IN (SELECT kind FROM outbox.job_servers)
            ), found AS (
                SELECT message_id FROM outbox.messages
                WHERE state = 'Pending' AND NOT parked AND kind IN (SELECT kind FROM unknown)
                LIMIT :limit FOR UPDATE SKIP LOCKED
            )
            UPDATE outbox.messages AS message
            SET parked = true, last_error = 'parked: no code location or worker has registered the kind '
                                            || quote_literal(message.kind) || '; it flows once one does'
            FROM found WHERE message.message_id = found.message_id
        """),
        {"limit": _PARKED_AT_ONCE, "served": served},
    )
    return int(done.rowcount)


def _enqueue_orphans(connection: Connection, kind: JobKind) -> int:
    """One INSERT ... WHERE NOT EXISTS. Those who start together take turns (an advisory lock of the
    transaction): the second's statement sees what the first has committed, and inserts nothing."""
    assert kind.domain is not None
    connection.execute(
        text("SELECT pg_advisory_xact_lock(hashtext('outbox_pipelines orphans'), hashtext(:kind))"),
        {"kind": kind.name},
    )
    live = kind.domain.live_jobs()
    done = connection.execute(
        text(f"""
            INSERT INTO outbox.messages (kind, job_id)
            SELECT DISTINCT :outbox_kind, live.job_id FROM ({live.sql}) AS live
            WHERE live.job_id IS NOT NULL AND NOT EXISTS (
                SELECT FROM outbox.messages AS message
                WHERE message.kind = :outbox_kind AND message.job_id = live.job_id
            )
        """),
        {**live.parameters, "outbox_kind": kind.name},
    )
    return int(done.rowcount)
