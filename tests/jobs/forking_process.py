"""A worker whose handlers fork and whose children come back: ``python -m tests.jobs.forking_process URL``.

A process of its own, since gRPC, which other tests use, does not survive a fork of theirs.
"""

import os
import sys
import time

from sqlalchemy import text

from outbox_pipelines.database.database import Database
from outbox_pipelines.jobs.context import JobContext
from outbox_pipelines.jobs.kinds import JobKind, Kinds
from outbox_pipelines.jobs.worker import Worker
from outbox_pipelines.settings import load_settings

children: list[int] = []


def fork(job: JobContext) -> None:
    """Note the execution, but not in the child, which returns to whoever called."""
    child = os.fork()
    if child == 0:
        return
    children.append(child)
    with job.session() as session:
        session.execute(text("INSERT INTO executions VALUES (:id)"), {"id": job.message_id})


def main(url: str) -> None:
    """Serve until nothing is left; print how the children ended."""
    settings = load_settings(database_url=url)
    left = text("SELECT EXISTS (SELECT FROM outbox.messages WHERE state <> 'Completed')")
    with Database(settings) as database, Worker(database, Kinds([JobKind("work", fork)]), settings):
        while True:
            with database.engine.connect() as connection:
                if not connection.execute(left).scalar_one():
                    break
            time.sleep(0.05)
    sys.stdout.write(" ".join(str(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main(sys.argv[1])
