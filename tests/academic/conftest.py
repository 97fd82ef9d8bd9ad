"""Fixtures: a database with the sample application's tables, one for the whole session, emptied for each test."""

import os
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from outbox_pipelines.academic.schema import install
from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.database.migrate import migrate
from outbox_pipelines.settings import load_settings
from tests.conftest import made_database


@pytest.fixture(scope="session")
def school_url(server_url: str) -> Iterator[str]:
    """The URL of a migrated database."""
    with made_database(server_url, f"outbox_academic_{os.getpid()}") as url:
        engine = open_engine(load_settings(), url, application_name="tests")
        migrate(engine)
        engine.dispose()
        yield url


@pytest.fixture
def bare_school(school_url: str) -> Iterator[Engine]:
    """An engine on that database, without messages and without the schema ``academic``."""
    engine = open_engine(load_settings(), school_url, application_name="tests", pool_size=20)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA IF EXISTS academic CASCADE")
        connection.exec_driver_sql("TRUNCATE outbox.messages, outbox.job_attempts RESTART IDENTITY")
    yield engine
    engine.dispose()


@pytest.fixture
def school(bare_school: Engine) -> Engine:
    """The same with the schema ``academic``."""
    with bare_school.begin() as connection:
        install(connection)
    return bare_school
