"""Attempts at the sample kinds' jobs, as a worker makes them, and what is left in the tables."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from sqlalchemy import Engine, Row, text
from sqlalchemy.orm import Session

from outbox_pipelines.jobs.context import JobContext
from outbox_pipelines.jobs.kinds import JobKind
from outbox_pipelines.jobs.message import Claimed
from outbox_pipelines.jobs.outbox import claim_message


class Attempt(JobContext):
    """A claimed job of the sample kinds; keeps what its handler tells, and can be stopped at any look.

    Args:
        engine: the database.
        kind: the job's kind.
        job_id: its domain job.
        looks: how often the handler may look before it is cancelled.
        on_step: called in the handler, when it has told a step.
    """

    def __init__(
        self,
        engine: Engine,
        kind: JobKind,
        job_id: int | str,
        *,
        looks: int | None = None,
        on_step: Callable[[str], None] = lambda _step: None,
    ) -> None:
        super().__init__(
            _claim(engine, kind, job_id), engine=engine, domain=kind.domain, holder="test", on_progress=self._hear
        )
        self.told: list[tuple[str, float | None]] = []
        self._looks = looks
        self._on_step = on_step

    @property
    def cancelled(self) -> bool:
        if self._looks is not None:
            self._looks -= 1
            if self._looks < 0:
                self.cancel()
        return super().cancelled

    def _hear(self, step: str, fraction: float | None) -> None:
        self.told.append((step, fraction))
        self._on_step(step)


def _claim(engine: Engine, kind: JobKind, job_id: int | str) -> Claimed:
    # Due at once, whatever the backoff after a failure says; and free, as if a worker had died.
    with engine.begin() as connection:
        message_id = connection.execute(
            text("""
                UPDATE outbox.messages SET state = 'Pending', available_at = now(), lease_token = NULL,
                       lease_expires_at = NULL
                WHERE kind = :kind AND job_id = :job RETURNING message_id
            """),
            {"kind": kind.name, "job": str(job_id)},
        ).scalar_one()
        claimed = claim_message(
            connection, message_id, kind=kind.name, holder="test", seconds=kind.lease, token=uuid4()
        )
    assert isinstance(claimed, Claimed), claimed
    return claimed


def request(engine: Engine, ask: Callable[..., int], *what: Any, **how: Any) -> int:
    """Ask for a job as the application does, and commit."""
    with Session(engine) as session, session.begin():
        return ask(session, *what, **how)


def message(engine: Engine, kind: JobKind, job_id: int) -> tuple[str, str | None]:
    """State and outcome of a job's message."""
    (row,) = rows(
        engine, f"SELECT state, outcome FROM outbox.messages WHERE kind = '{kind.name}' AND job_id = '{job_id}'"
    )
    return row[0], row[1]


def rows(engine: Engine, query: str) -> list[Row[Any]]:
    """What a query finds."""
    with engine.connect() as connection:
        return list(connection.execute(text(query)))


def run(engine: Engine, statement: str) -> None:
    """Run a statement and commit."""
    with engine.begin() as connection:
        connection.execute(text(statement))
