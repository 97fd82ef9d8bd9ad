"""The application's own table of jobs, as far as the job outbox touches it.

The application keeps a row for each job (the *domain job*) for its users to see; a message
points to it with ``job_id``. :class:`TableDomain` says in a few words how that table looks.
For anything else, write a class with the methods of :class:`Domain`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from sqlalchemy import Connection, text
from sqlalchemy.exc import DataError

from outbox_pipelines.database.error_text import error_text
from outbox_pipelines.database.quoting import quote_identifier
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.jobs.message import Outcome

_SHORTER = (250, 50)
"""Characters that a message is cut to where the column is too short for it."""


class InvalidDomain(OutboxError):
    """A domain that cannot be used; the text has the remedy."""


class Standing(StrEnum):
    """Where a domain job is, as far as it decides whether its handler is called."""

    LIVE = "live"
    """To be worked on."""

    SUCCEEDED = "succeeded"
    """Done already: the message is completed without calling the handler."""

    CANCELLED = "cancelled"
    """Not wanted any more: the message is cancelled without calling the handler."""

    MISSING = "missing"
    """There is no such job, or its id is written in another way: the message is given up with that reason."""


@dataclass(frozen=True)
class LiveJobs:
    """A query for the domain jobs that should have a message."""

    sql: str
    """A SELECT of one column ``job_id`` of type text, with ``:name`` parameters."""

    parameters: Mapping[str, object] = field(default_factory=dict)


class Domain(Protocol):
    """What the job outbox asks of the application's table.

    Every method runs in a transaction of the package, on a connection to the database that
    holds the messages, and neither commits nor rolls back.
    """

    def standing(self, connection: Connection, job_id: str) -> Standing:
        """Where the job is; asked before its handler is called."""

    def close(self, connection: Connection, job_id: str, outcome: Outcome, message: str) -> None:
        """Mark a job that is not over yet as failed or cancelled, with a message for people."""

    def reopen(self, connection: Connection, job_id: str) -> None:
        """Make a failed or cancelled job live again: somebody retries its message."""

    def note_step(self, connection: Connection, job_id: str, step: str) -> None:
        """Show people the step that the handler is at."""

    def live_jobs(self) -> LiveJobs:
        """The jobs in a live status; those without a message are given one at start."""


@dataclass(frozen=True)
class TableDomain:
    """A table with a row for each job, an id and a status.

    >>> TableDomain("app.timetable_jobs", live=("queued", "running"), failed="failed")
    TableDomain(table='app.timetable_jobs', ...)
    """

    table: str
    """Its name with its schema: ``schema.table``."""

    live: tuple[str, ...]
    """The status values of jobs that are not over; a retried job gets the first of them."""

    failed: str
    """The status value of a job that was given up."""

    succeeded: str | None = None
    """The status value that the handler gives a job that is done. When named, such a job's
    handler is not called again."""

    cancelled: str | None = None
    """The status value of a cancelled job; :attr:`failed` is used where there is none."""

    id_column: str = "id"
    status_column: str = "status"

    message_column: str | None = None
    """Where a text for people goes, if anywhere."""

    step_column: str | None = None
    """Where the handler's current step goes, if anywhere."""

    where: str | None = None
    """A condition in SQL that tells this kind's jobs from others in the table; needed where two
    kinds share one."""

    def __post_init__(self) -> None:
        if not isinstance(self.table, str):
            raise InvalidDomain(f"domain table {self.table!r}: name it with its schema, as in 'public.jobs'")
        schema, _, name = self.table.partition(".")
        if not schema or not name or "." in name:
            raise InvalidDomain(f"domain table {self.table!r}: name it with its schema, as in 'public.jobs'")
        if not isinstance(self.live, tuple) or not self.live:
            raise InvalidDomain(f"domain table {self.table!r}: live must be a tuple of status values, ('queued',)")
        if not all(isinstance(value, str) for value in (*self.live, self.failed)):
            raise InvalidDomain(f"domain table {self.table!r}: status values are texts, and failed is needed")
        final = {self.failed, self.succeeded, self.cancelled}
        both = sorted(final & set(self.live), key=str)
        if both:
            raise InvalidDomain(f"domain table {self.table!r}: status {both[0]!r} is named both live and final")

    def standing(self, connection: Connection, job_id: str) -> Standing:
        """See :class:`Domain`."""
        query = text(
            f"SELECT {_name(self.status_column)}::text, {_name(self.id_column)}::text FROM {self._table} "
            f"WHERE {_name(self.id_column)} = :id"
        )
        try:
            with connection.begin_nested():
                row = connection.execute(query, {"id": job_id}).one_or_none()
        except DataError:
            # Text that is no value of the id's type.
            return Standing.MISSING
        if row is None or row[1] != job_id:
            # Written in another way than the table writes it ('077', a UUID without dashes), the message would
            # not be seen to be this job's when orphans are looked for.
            return Standing.MISSING
        if self.succeeded is not None and row[0] == self.succeeded:
            return Standing.SUCCEEDED
        if self.cancelled is not None and row[0] == self.cancelled:
            return Standing.CANCELLED
        return Standing.LIVE

    def close(self, connection: Connection, job_id: str, outcome: Outcome, message: str) -> None:
        """See :class:`Domain`."""
        status = self.cancelled if outcome is Outcome.CANCELLED and self.cancelled is not None else self.failed
        live, parameters = self._status_in(self.live)
        sets = [f"{_name(self.status_column)} = :status"]
        if self.message_column is not None:
            sets.append(f"{_name(self.message_column)} = :message")
            parameters["message"] = message
        statement = f"UPDATE {self._table} SET {', '.join(sets)} WHERE {_name(self.id_column)} = :id AND {live}"
        for cut in (None, *_SHORTER):
            if cut is not None and "message" in parameters:
                parameters["message"] = error_text(message, limit=cut)
            try:
                with connection.begin_nested():
                    connection.execute(text(statement), {**parameters, "status": status, "id": job_id})
                return
            except DataError:
                # The column may be shorter than the text; the status matters more.
                if cut == _SHORTER[-1] or self.message_column is None:
                    raise

    def reopen(self, connection: Connection, job_id: str) -> None:
        """See :class:`Domain`."""
        closed, parameters = self._status_in(
            (self.failed,) if self.cancelled is None else (self.failed, self.cancelled)
        )
        sets = [f"{_name(self.status_column)} = :status"]
        if self.message_column is not None:
            sets.append(f"{_name(self.message_column)} = NULL")
        connection.execute(
            text(f"UPDATE {self._table} SET {', '.join(sets)} WHERE {_name(self.id_column)} = :id AND {closed}"),
            {**parameters, "status": self.live[0], "id": job_id},
        )

    def note_step(self, connection: Connection, job_id: str, step: str) -> None:
        """See :class:`Domain`."""
        if self.step_column is None:
            return
        connection.execute(
            text(f"UPDATE {self._table} SET {_name(self.step_column)} = :step WHERE {_name(self.id_column)} = :id"),
            {"step": step, "id": job_id},
        )

    def live_jobs(self) -> LiveJobs:
        """See :class:`Domain`."""
        live, parameters = self._status_in(self.live)
        also = f" AND ({self.where})" if self.where else ""
        query = f"SELECT {_name(self.id_column)}::text AS job_id FROM {self._table} WHERE {live}{also}"
        return LiveJobs(query, parameters)

    @property
    def _table(self) -> str:
        schema, _, name = self.table.partition(".")
        return f"{_name(schema)}.{_name(name)}"

    def _status_in(self, values: tuple[str, ...]) -> tuple[str, dict[str, object]]:
        # One parameter each, without a type: the server takes them for the column's, an enum for example.
        parameters: dict[str, object] = {f"status_{place}": value for place, value in enumerate(values)}
        return f"{_name(self.status_column)} IN ({', '.join(f':{name}' for name in parameters)})", parameters


def _name(identifier: str) -> str:
    # A colon would begin a parameter.
    return quote_identifier(identifier).replace(":", "\\:")
