"""One spelling of a database URL for each driver, whatever the user wrote.

A bare ``postgresql://`` means another driver in each release of SQLAlchemy, and
Dagster's storage works with psycopg 2 only (its ``NOTIFY`` with a bound parameter
is a syntax error under psycopg 3), so the driver is always written out.
"""

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from outbox_pipelines.errors import OutboxError

_SCHEMES = frozenset(
    {"postgres", "postgresql", "postgresql+psycopg", "postgresql+psycopg2", "postgresql+psycopg_async"}
)


class InvalidDatabaseUrl(OutboxError):
    """The text is not the URL of a PostgreSQL database."""


def engine_url(url: str | URL, *, variable: str = "OUTBOX_DATABASE_URL") -> URL:
    """The URL for this package's own connections (psycopg 3).

    Raises:
        InvalidDatabaseUrl: naming ``variable``; never repeats the password.
    """
    return _parse(url, variable).set(drivername="postgresql+psycopg")


def dagster_storage_url(url: str | URL, *, variable: str = "OUTBOX_DAGSTER_DATABASE_URL") -> URL:
    """The URL for Dagster's storage (psycopg 2)."""
    return _parse(url, variable).set(drivername="postgresql+psycopg2")


def render(url: URL) -> str:
    """The URL as text with its password, for an environment variable of a child process."""
    return url.render_as_string(hide_password=False)


def _parse(url: str | URL, variable: str) -> URL:
    example = "for example postgresql://user:password@host:5432/database"
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # The text may hold a password: it is not repeated.
        raise InvalidDatabaseUrl(f"{variable} is not a URL; write it like this, {example}") from None
    if parsed.drivername not in _SCHEMES:
        raise InvalidDatabaseUrl(
            f"{variable} begins with {parsed.drivername!r}; this package works with PostgreSQL, {example}"
        )
    if "@" in (parsed.host or ""):
        # The rest of a password: told in no error.
        raise InvalidDatabaseUrl(f"{variable} has more than one @: write those in the password as %40, {example}")
    if not parsed.database:
        raise InvalidDatabaseUrl(f"{variable} names no database; add it at the end, {example}")
    return parsed
