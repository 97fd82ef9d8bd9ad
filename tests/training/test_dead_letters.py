"""Dead letters are looked at, put back with their ids, or thrown away; each once."""

import threading
from typing import Any

import grpc
import pytest
from sqlalchemy import Engine

from outbox_pipelines.ml_service import training_pb2
from outbox_pipelines.settings import Settings
from outbox_pipelines.training.dead_letters import (
    UnknownDeadLetter,
    count_dead_letters,
    discard,
    list_dead_letters,
    redrive,
    require_all,
    show_dead_letter,
)
from tests.outboxes import dead_letters, enqueue, flush, ledger_ids, new_tenant, waiting_ids
from tests.scripted_service import ScriptedService, accept
from tests.upkeep.aged import bury


def refuse_even(
    request: training_pb2.TrainBatchRequest, _context: grpc.ServicerContext
) -> training_pb2.TrainBatchResponse:
    ids = [example.id for example in request.examples]
    response = training_pb2.TrainBatchResponse(accepted=[row_id for row_id in ids if row_id % 2])
    for row_id in ids:
        if not row_id % 2:
            response.rejected.add(id=row_id, reason="even")
    return response


def test_a_row_that_was_refused_is_put_back_with_its_id_and_delivered_under_it(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=5)
    service.answer = refuse_even
    flush(engine, settings, tenant)
    assert set(dead_letters(engine, tenant)) == {2, 4}
    with engine.begin() as connection:
        assert redrive(connection, tenant, [4, 2]) == [2, 4]
    assert waiting_ids(engine, tenant) == [2, 4]
    service.answer = accept
    flush(engine, settings, tenant)
    assert ledger_ids(engine, tenant) == [1, 2, 3, 4, 5]
    assert dead_letters(engine, tenant) == {}


def test_what_is_put_back_keeps_its_age_its_attempts_and_why_it_was_dead(engine: Engine) -> None:
    tenant = new_tenant(engine)
    bury(engine, tenant, 1, days=3)
    with engine.begin() as connection:
        (letter,) = list_dead_letters(connection, tenant, limit=10)
        redrive(connection, tenant, [1])
        row = connection.exec_driver_sql(f'SELECT * FROM "{tenant.schema}".ml_outbox').one()
    assert (row.id, row.created_at, row.attempts, row.last_error) == (1, letter.created_at, 1, "no")
    (new,) = enqueue(engine, tenant, [{"n": 2}])
    assert new != 1


def test_the_latest_are_listed_first_and_one_is_shown_with_its_example(engine: Engine) -> None:
    tenant = new_tenant(engine)
    bury(engine, tenant, 2, days=3)
    bury(engine, tenant, 1, days=1)
    with engine.connect() as connection:
        assert [one.row_id for one in list_dead_letters(connection, tenant, limit=2)] == [3, 2]
        letter, payload = show_dead_letter(connection, tenant, 2)
        assert count_dead_letters(connection, tenant) == 3
    assert (letter.reason, letter.run_id, payload) == ("no", "run", {"n": 1})


@pytest.mark.parametrize("act", [redrive, discard])
def test_an_id_that_is_no_dead_letter_moves_nothing_and_names_the_remedy(engine: Engine, act: Any) -> None:
    tenant = new_tenant(engine, rows=1)
    bury(engine, tenant, 2, days=1)
    with pytest.raises(UnknownDeadLetter) as refused, engine.begin() as connection:
        require_all(tenant, [2, 77], act(connection, tenant, [2, 77]))
    assert str(refused.value) == (
        "tenant 'acme' has no dead letter 77: nothing was changed; `outbox audit --tenant acme --row 77` says where a "
        "row is"
    )
    assert set(dead_letters(engine, tenant)) == {2, 3}
    with engine.connect() as connection, pytest.raises(UnknownDeadLetter):
        show_dead_letter(connection, tenant, 77)


def test_what_is_discarded_is_gone(engine: Engine) -> None:
    tenant = new_tenant(engine)
    bury(engine, tenant, 3, days=1)
    with engine.begin() as connection:
        assert discard(connection, tenant, [3, 1]) == [1, 3]
    assert set(dead_letters(engine, tenant)) == {2}
    assert waiting_ids(engine, tenant) == []


def test_two_who_put_the_same_back_at_once_move_it_once(engine: Engine) -> None:
    tenant = new_tenant(engine)
    bury(engine, tenant, 200, days=1)
    moved: list[int] = []

    def move() -> None:
        for row_id in range(1, 201):
            with engine.begin() as connection:
                moved.extend(redrive(connection, tenant, [row_id]))

    threads = [threading.Thread(target=move) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(moved) == list(range(1, 201)) == waiting_ids(engine, tenant)
