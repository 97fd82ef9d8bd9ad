"""Migrations wait for each other: for longer than other statements may take."""

import threading
import time
from collections.abc import Callable

from sqlalchemy import Engine, text

from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.database.migrate import migrate, migrate_tenant
from outbox_pipelines.settings import Settings
from tests.outboxes import new_tenant, wait_until


def test_a_migration_waits_for_another_for_longer_than_a_statement_may_take(
    engine: Engine, make_settings: Callable[..., Settings], database_url: str
) -> None:
    new_tenant(engine, schema="shop")
    impatient = open_engine(
        make_settings(statement_timeout=1, lock_timeout=0.1), database_url, application_name="impatient"
    )
    changed: list[int] = []
    waiting = text("""
        SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'impatient' AND wait_event = 'advisory'
    """)
    thread = threading.Thread(target=lambda: changed.append(migrate(impatient)))
    with engine.begin() as another:
        migrate_tenant(another, "shop")
        thread.start()
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as observer:
            wait_until(lambda: observer.execute(waiting).scalar_one() == 1)
            # Longer than both time-outs.
            time.sleep(1.2)
            assert observer.execute(waiting).scalar_one() == 1
    thread.join(30)
    impatient.dispose()
    assert changed == [0]
