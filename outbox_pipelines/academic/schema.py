"""The sample application's own tables: its domain jobs and what these make.

Not a part of the package's migrations: the tables are the application's, as they would be
in a system that the job outbox is added to.
"""

from sqlalchemy import Connection, text

from outbox_pipelines.academic.instance import SHIPPED, shipped_instance

_JOB_COLUMNS = """
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    status       text NOT NULL DEFAULT 'queued'
                 CHECK (status IN ('queued', 'running', 'succeeded', 'failed', 'cancelled')),
    message      text,
    current_step text,
    created_at   timestamptz NOT NULL DEFAULT now(),
    started_at   timestamptz,
    succeeded_at timestamptz
"""

_TABLES = f"""
    CREATE SCHEMA IF NOT EXISTS academic;

    CREATE TABLE IF NOT EXISTS academic.rooms (
        name     text PRIMARY KEY,
        capacity integer NOT NULL
    );

    CREATE TABLE IF NOT EXISTS academic.timetable_jobs (
        {_JOB_COLUMNS},
        instance   text NOT NULL,
        seed       integer NOT NULL,
        iterations integer NOT NULL CHECK (iterations >= 0),
        cost       integer
    );
    CREATE TABLE IF NOT EXISTS academic.lectures (
        timetable_id bigint NOT NULL REFERENCES academic.timetable_jobs ON DELETE CASCADE,
        course       text NOT NULL,
        day          integer NOT NULL,
        period       integer NOT NULL,
        room         text NOT NULL,
        PRIMARY KEY (timetable_id, day, period, room)
    );

    CREATE TABLE IF NOT EXISTS academic.publication_jobs (
        {_JOB_COLUMNS},
        timetable_id bigint NOT NULL
    );
    -- What everybody may read. A notice without lectures has a reason instead.
    CREATE TABLE IF NOT EXISTS academic.notices (
        publication_id bigint PRIMARY KEY REFERENCES academic.publication_jobs ON DELETE CASCADE,
        timetable_id   bigint NOT NULL,
        reason         text,
        published_at   timestamptz NOT NULL DEFAULT now()
    );
    CREATE TABLE IF NOT EXISTS academic.notice_lectures (
        publication_id bigint NOT NULL REFERENCES academic.notices ON DELETE CASCADE,
        course         text NOT NULL,
        day            integer NOT NULL,
        period         integer NOT NULL,
        room           text NOT NULL,
        PRIMARY KEY (publication_id, day, period, room)
    );

    CREATE TABLE IF NOT EXISTS academic.exam_jobs (
        {_JOB_COLUMNS},
        course       text NOT NULL,
        students     integer NOT NULL CHECK (students > 0),
        day          integer NOT NULL CHECK (day BETWEEN 0 AND 6),
        period       integer NOT NULL CHECK (period >= 0),
        timetable_id bigint
    );
    -- The key keeps two exams, placed at the same moment, from the same room.
    CREATE TABLE IF NOT EXISTS academic.exams (
        exam_id bigint NOT NULL UNIQUE REFERENCES academic.exam_jobs ON DELETE CASCADE,
        day     integer NOT NULL,
        period  integer NOT NULL,
        room    text NOT NULL REFERENCES academic.rooms,
        PRIMARY KEY (day, period, room)
    );
"""


def install(connection: Connection) -> None:
    """Make the schema ``academic``, its tables and the school's rooms where they are missing.

    The caller commits.
    """
    # IF NOT EXISTS alone does not keep two that install at the same time apart.
    connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('outbox_pipelines.academic'))"))
    connection.exec_driver_sql(_TABLES)
    for name in SHIPPED:
        connection.execute(
            text("""
                INSERT INTO academic.rooms (name, capacity) VALUES (:name, :capacity)
                ON CONFLICT (name) DO NOTHING
            """),
            [{"name": room.name, "capacity": room.capacity} for room in shipped_instance(name).rooms],
        )
