"""A process that starts, gives orphans their messages, prints how many those were, and ends."""

import sys

from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.jobs.recovery import recover_orphans
from outbox_pipelines.settings import load_settings
from tests.jobs.messages import APP_JOBS, a_kind

if __name__ == "__main__":
    engine = open_engine(load_settings(), sys.argv[1], application_name="recovering")
    done = recover_orphans(engine, [a_kind(domain=APP_JOBS)])
    print(done.orphans, *done.problems)  # noqa: T201
