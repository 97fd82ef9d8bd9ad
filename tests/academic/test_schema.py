"""The sample application's tables."""

from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import Engine

from outbox_pipelines.academic.schema import install
from tests.academic.attempts import rows, run


def test_installing_again_keeps_everything(school: Engine) -> None:
    run(school, "INSERT INTO academic.timetable_jobs (instance, seed, iterations) VALUES ('comp01', 1, 1)")
    run(school, "UPDATE academic.rooms SET capacity = 31 WHERE name = 'F'")
    with school.begin() as connection:
        install(connection)
    assert rows(school, "SELECT status FROM academic.timetable_jobs") == [("queued",)]
    assert rows(school, "SELECT name, capacity FROM academic.rooms ORDER BY name") == [
        ("B", 200),
        ("C", 100),
        ("E", 9),
        ("F", 31),
        ("G", 20),
        ("S", 30),
    ]


def test_several_may_install_at_the_same_time(bare_school: Engine) -> None:
    def install_once(_: int) -> None:
        with bare_school.begin() as connection:
            install(connection)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(install_once, range(8)))
    assert len(rows(bare_school, "SELECT FROM academic.rooms")) == 6
