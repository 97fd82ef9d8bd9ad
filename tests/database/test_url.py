"""Database URLs: one spelling for each driver, and a password that is never told."""

import traceback

import pytest
from sqlalchemy import make_url

from outbox_pipelines.database.engine import describe, open_engine
from outbox_pipelines.database.url import InvalidDatabaseUrl, dagster_storage_url, engine_url, render
from outbox_pipelines.settings import load_settings

SPELLINGS = ["postgres", "postgresql", "postgresql+psycopg", "postgresql+psycopg2", "postgresql+psycopg_async"]


def refusal(url: str) -> str:
    """What is said of a URL that must be refused, with everything that a traceback would show."""
    with pytest.raises(InvalidDatabaseUrl) as raised:
        engine_url(url)
    return str(raised.value) + "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("scheme", SPELLINGS)
def test_every_spelling_gets_the_driver_written_out(scheme: str) -> None:
    url = f"{scheme}://user:p%40ss@host:6543/database?sslmode=require"
    assert render(engine_url(url)) == "postgresql+psycopg://user:p%40ss@host:6543/database?sslmode=require"
    assert render(dagster_storage_url(url)) == "postgresql+psycopg2://user:p%40ss@host:6543/database?sslmode=require"


def test_a_parsed_url_is_taken_too_and_left_as_it_was() -> None:
    url = make_url("postgresql:///outbox?host=/run/postgresql")
    assert engine_url(url) == make_url("postgresql+psycopg:///outbox?host=/run/postgresql")
    assert url.drivername == "postgresql"


@pytest.mark.parametrize("scheme", ["mysql", "sqlite", "postgresql+asyncpg", "http"])
def test_another_database_is_refused_by_its_scheme(scheme: str) -> None:
    told = refusal(f"{scheme}://user:hunter2@host/database")
    assert f"OUTBOX_DATABASE_URL begins with {scheme!r}" in told
    assert "postgresql://user:password@host:5432/database" in told


@pytest.mark.parametrize("url", ["postgresql://user:hunter2@host", "postgresql://user:hunter2@host/", "postgresql://"])
def test_a_url_without_a_database_is_refused(url: str) -> None:
    assert "names no database" in refusal(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host=127.0.0.1 password=hunter2",
        "user:hunter2@host/database",
        "postgresql:/user:hunter2@host/database",
        "postgresql://user:hunter2@host:port/database",
        "postgresql://user:hunter2@[::1/database",
    ],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    told = refusal(url)
    assert "OUTBOX_DATABASE_URL" in told


@pytest.mark.parametrize(
    "url",
    [
        "mysql://user:hunter2@host/database",
        "postgresql://user:hunter2@host",
        "postgresql://user:hunter2@host:port/database",
        "user:hunter2@host/database",
        "postgresql://user:hunter2@",
        "password=hunter2",
    ],
)
def test_the_password_never_appears_in_an_error(url: str) -> None:
    assert "hunter2" not in refusal(url)


def test_the_end_of_a_password_with_an_unescaped_at_sign_is_not_told_as_the_host() -> None:
    try:
        told = describe(open_engine(load_settings(), "postgresql://user:half@hunter2@host/db", application_name="x"))
    except InvalidDatabaseUrl as error:
        told = str(error)
    assert "hunter2" not in told


@pytest.mark.parametrize("address", ["user:hunter2@host/database", "user@host/database?password=hunter2"])
def test_the_password_is_not_part_of_the_address_for_people(address: str) -> None:
    engine = open_engine(load_settings(), f"postgresql://{address}", application_name="tests")
    assert describe(engine) == "database 'database' on host"


def test_the_variable_that_holds_the_url_is_named() -> None:
    with pytest.raises(InvalidDatabaseUrl, match=r"^OUTBOX_DAGSTER_DATABASE_URL is not a URL"):
        dagster_storage_url("junk")
