"""What is kept for how long, and the purge of one day of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from sqlalchemy import Connection, Engine, text

from outbox_pipelines.database.progress import DAILY, note_success
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.settings import Settings
from outbox_pipelines.tenants.registry import list_tenants
from outbox_pipelines.training.backlog import oldest_dead_letters
from outbox_pipelines.upkeep.archive import Archived, archive
from outbox_pipelines.upkeep.purge import (
    COMPLETED_JOBS,
    DELIVERIES,
    JOB_ATTEMPTS,
    Aged,
    Purged,
    dead_letters_of,
    oldest,
    purge,
)

FIRST_DAY = date(2024, 1, 1)
"""The first day that has a partition; what is older goes with it."""


class TooYoung(OutboxError):
    """A day was to be purged that is to be kept."""


@dataclass(frozen=True)
class Place:
    """A table with old rows."""

    aged: Aged
    oldest: datetime
    folder: str
    """Of its archive, below that of all rows of its sort."""


@dataclass(frozen=True)
class Retention:
    """Rows of one sort, and how long they are kept."""

    name: str
    """Of the asset, and of the task in outbox.upkeep."""

    noun: str
    days: float
    setting: str
    """The variable that says how long."""

    description: str
    places: Callable[[Engine, datetime], list[Place]]
    """The tables that have rows from before an instant."""


def retentions(settings: Settings) -> list[Retention]:
    """All that is purged."""
    return [
        Retention(
            "completed_jobs_retention",
            "completed message",
            settings.completed_retention_days,
            "OUTBOX_COMPLETED_RETENTION_DAYS",
            "Completed background jobs, by the day of their completion.",
            _in_one_table(COMPLETED_JOBS),
        ),
        Retention(
            "job_ledger_retention",
            "job ledger line",
            settings.job_ledger_retention_days,
            "OUTBOX_JOB_LEDGER_RETENTION_DAYS",
            "The ledger of attempts at background jobs, by the day on which each ended.",
            _in_one_table(JOB_ATTEMPTS),
        ),
        Retention(
            "training_ledger_retention",
            "training ledger line",
            settings.training_ledger_retention_days,
            "OUTBOX_TRAINING_LEDGER_RETENTION_DAYS",
            "The ledger of deliveries to the ML service, by their day.",
            _in_one_table(DELIVERIES),
        ),
        Retention(
            "training_dead_letters_retention",
            "dead letter",
            settings.dead_letter_retention_days,
            "OUTBOX_DEAD_LETTER_RETENTION_DAYS",
            "Training examples that were taken out of the flow, by the day on which they were.",
            _dead_letters,
        ),
    ]


def newest_day(connection: Connection, retention: Retention) -> date:
    """The last day all of whose rows are older than the retention, by the database's clock."""
    now: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
    return (now.astimezone(UTC) - timedelta(days=retention.days)).date() - timedelta(days=1)


def due_days(engine: Engine, retention: Retention) -> tuple[date, date] | None:
    """The first and the last day that are to be purged now; none when nothing is old enough."""
    with engine.connect() as connection:
        last = newest_day(connection, retention)
    places = retention.places(engine, _end(last))
    if not places:
        return None
    first = min(place.oldest for place in places).astimezone(UTC).date()
    return max(first, FIRST_DAY), last


@dataclass(frozen=True)
class PurgedDay:
    """What the purge of one day did."""

    day: date
    purged: Purged
    archives: Sequence[Archived]
    oldest_left: datetime | None
    """The oldest row that is still there, of any day."""


def purge_days(
    engine: Engine,
    retention: Retention,
    days: Sequence[date],
    *,
    pause: float,
    archive_dir: Path | None,
    on_day: Callable[[PurgedDay], None],
) -> None:
    """Purge some days, the oldest first; each is told of as soon as it is done.

    Raises:
        TooYoung: naming the days that are to be kept; nothing was deleted.
        ArchiveFailed: that day's rows are all there.
    """
    with engine.connect() as connection:
        newest = newest_day(connection, retention)
    young = [day for day in days if day > newest]
    if young:
        named = str(young[0]) if len(young) == 1 else f"{young[0]} to {young[-1]}"
        first = young[0] + timedelta(days=retention.days + 1)
        raise TooYoung(
            f"{named}: {retention.noun}s are kept for {retention.days:g} days ({retention.setting}), so nothing was "
            f"deleted; the newest day that may be purged is {newest}, and {young[0]} may be from {first}"
        )
    places = retention.places(engine, _end(max(days)))
    for day in sorted(days):
        since = None if day == FIRST_DAY else datetime(day.year, day.month, day.day, tzinfo=UTC)
        whole, archives = Purged(), list[Archived]()
        for place in places:
            if place.oldest >= _end(day):
                continue
            kept = None
            if archive_dir is not None:
                folder = archive_dir / retention.name / place.folder
                kept = archive(engine, place.aged, folder, day, since=since, before=_end(day))
                if kept is None:
                    continue
                archives.append(kept)
            keys = kept.key_chunks() if kept is not None else None
            whole += purge(engine, place.aged, since=since, before=_end(day), pause=pause, keys=keys)
        with engine.begin() as connection:
            note_success(connection, retention.name, whole.rows, every=DAILY)
        on_day(PurgedDay(day, whole, archives, oldest_left(engine, retention)))


def oldest_left(engine: Engine, retention: Retention) -> datetime | None:
    """From when the oldest row is, of any table; none when there is none of about the retention's age."""
    # Looked for among what is not much younger than the retention: a ledger's youngest part is large, and has no
    # index that gives its oldest line at once.
    with engine.connect() as connection:
        before = _end(newest_day(connection, retention) + timedelta(days=1))
    return min((place.oldest for place in retention.places(engine, before)), default=None)


def _end(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1)


def _in_one_table(aged: Aged) -> Callable[[Engine, datetime], list[Place]]:
    def places(engine: Engine, before: datetime) -> list[Place]:
        with engine.connect() as connection:
            found = oldest(connection, aged, before=before)
        return [] if found is None else [Place(aged, found, "")]

    return places


def _dead_letters(engine: Engine, before: datetime) -> list[Place]:
    with engine.connect() as connection:
        tenants = {entry.tenant.schema: entry.tenant for entry in list_tenants(connection)}
    found = oldest_dead_letters(engine, list(tenants), before=before)
    return [
        Place(dead_letters_of(schema), died_at, str(tenants[schema].tenant_id)) for schema, died_at in found.items()
    ]
