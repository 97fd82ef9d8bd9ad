"""Recovery: what dead workers and lost runs left behind is brought back, and unknown kinds wait with a reason."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox_pipelines.jobs.kinds import Kinds
from outbox_pipelines.jobs.message import AttemptOutcome
from outbox_pipelines.jobs.recovery import Recovered, forget_server, note_served, recover
from outbox_pipelines.jobs.transport import Served
from tests.jobs.messages import (
    KIND,
    a_kind,
    age_publishes,
    end,
    enqueue,
    enqueue_many,
    ledger,
    let_expire,
    row,
    rows,
    run,
    set_state,
    states,
    take,
    take_due,
    value,
)

TIMEOUT = 120.0


def bring_back(engine: Engine, *kinds: str, **how: Any) -> Recovered:
    """A recovery by somebody who serves these kinds."""
    return recover(engine, Kinds(a_kind(name) for name in kinds or (KIND,)), publish_timeout=TIMEOUT, **how)


def serve(engine: Engine, *kinds: str, server: str = "worker 1") -> None:
    """Note somebody who serves these kinds."""
    with engine.begin() as connection:
        note_served(connection, server, [Served(kind, 2) for kind in kinds])


# Lost claims


def test_a_job_whose_worker_died_is_recovered_from_its_row_alone(engine: Engine) -> None:
    serve(engine, KIND)
    lost, running = enqueue_many(engine, 2)
    take(engine, lost, holder="host a")
    second = take(engine, running, holder="host a")
    assert bring_back(engine) == Recovered()
    let_expire(engine, lost)
    # By a process of another kind, that never heard of it.
    assert bring_back(engine, "other") == Recovered(lost_leases=1)
    assert bring_back(engine) == Recovered()
    # A worker with the same name finds it due.
    (again,) = take_due(engine, holder="host a")
    assert (again.message_id, again.attempt) == (lost, 2)
    assert ledger(engine, lost) == [(1, 1, "lost")]
    assert row(engine, running).lease_token == second.lease.token


def test_a_handler_that_kills_its_process_is_tried_as_often_as_is_allowed_and_each_time_is_counted(
    engine: Engine,
) -> None:
    message_id = enqueue(engine)
    for attempt in (1, 2, 3):
        for _ in range(2):
            # Given back in between: does not count.
            assert end(engine, take(engine, message_id), AttemptOutcome.INTERRUPTED)
        assert take(engine, message_id).attempt == attempt
        let_expire(engine)
        assert bring_back(engine).lost_leases == 1
    over = take(engine, message_id)
    assert over.attempt == 4
    end(engine, over, AttemptOutcome.GIVEN_UP, "given up after 3 attempts")
    lines = ledger(engine, message_id)
    assert [outcome for _, _, outcome in lines].count("lost") == 3
    assert [claim for claim, _, _ in lines] == list(range(1, 11))


def test_thousands_of_lost_claims_are_recovered_at_once(engine: Engine) -> None:
    serve(engine, KIND)
    enqueue_many(engine, 2_500)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox.messages SET available_at = now()"))
    assert len(take_due(engine, limit=2_500, ready=0)) == 2_500
    let_expire(engine)
    assert bring_back(engine) == Recovered(lost_leases=2_500)
    assert set(states(engine).values()) == {"Pending"}
    assert value(engine, "SELECT count(DISTINCT message_id) FROM outbox.job_attempts WHERE outcome = 'lost'") == 2_500


def test_recoveries_at_once_count_each_lost_claim_once(engine: Engine) -> None:
    serve(engine, KIND)
    enqueue_many(engine, 1_200)
    take_due(engine, limit=1_200)
    let_expire(engine)
    with ThreadPoolExecutor(4) as threads:
        done = [one.result() for one in [threads.submit(bring_back, engine) for _ in range(4)]]
    assert sum(one.lost_leases for one in done) == 1_200
    assert value(engine, "SELECT count(*) FROM outbox.job_attempts") == 1_200
    assert value(engine, "SELECT max(lost_leases) FROM outbox.messages") == 1


def test_a_processing_message_of_long_ago_is_kept_as_long_as_its_lease_is(engine: Engine) -> None:
    take(engine, enqueue(engine))
    run(engine, "UPDATE outbox.messages SET created_at = now() - interval '30 days', claimed_at = created_at")
    assert bring_back(engine).lost_leases == 0


# Lost publishes


def test_a_publish_that_nobody_confirmed_in_time_is_taken_back(engine: Engine) -> None:
    old, young = enqueue_many(engine, 2)
    for message_id in (old, young):
        set_state(engine, message_id, "Publishing")
    age_publishes(engine, old)
    age_publishes(engine, young, seconds=TIMEOUT - 30)
    serve(engine, KIND)
    assert bring_back(engine) == Recovered(lost_publishes=1)
    assert states(engine) == {old: "Pending", young: "Publishing"}
    found = row(engine, old)
    assert (found.publish_token, found.publish_attempts) == (None, 1)
    assert found.last_error == "not claimed within 120 s of publishing"
    assert ledger(engine, old) == []


def test_a_message_whose_run_was_seen_is_left_to_its_sensor_except_where_a_worker_serves_the_kind(
    engine: Engine,
) -> None:
    mine, others = enqueue(engine), enqueue(engine, "other")
    for message_id in (mine, others):
        set_state(engine, message_id, "Published")
    age_publishes(engine)
    serve(engine, KIND, "other")
    assert bring_back(engine) == Recovered()
    assert bring_back(engine, also_published=True) == Recovered(lost_publishes=1)
    assert states(engine) == {mine: "Pending", others: "Published"}
    (claimed,) = take_due(engine)
    assert claimed.message_id == mine


# Unknown kinds


def test_a_kind_that_nobody_registered_is_parked_with_its_reason_and_the_others_flow(engine: Engine) -> None:
    serve(engine, KIND)
    unknown = [enqueue(engine, kind) for kind in ("aaa", "who's this", "zzz")]
    known = enqueue(engine)
    assert bring_back(engine) == Recovered(parked=3)
    assert [row(engine, message_id).parked for message_id in unknown] == [True] * 3
    assert row(engine, unknown[1]).last_error == (
        "parked: no code location or worker has registered the kind 'who''s this'; it flows once one does"
    )
    assert (row(engine, known).parked, row(engine, known).last_error) == (False, None)
    assert [one.message_id for one in take_due(engine)] == [known]
    # Told once.
    assert bring_back(engine) == Recovered()
    more = enqueue(engine, "zzz")
    assert bring_back(engine, "other") == Recovered(parked=1)
    assert {states(engine)[message_id] for message_id in [*unknown, more]} == {"Pending"}


def test_a_parked_kind_flows_once_it_is_registered(engine: Engine) -> None:
    serve(engine, "another")
    message_id = enqueue(engine)
    assert bring_back(engine, "another").parked == 1
    serve(engine, KIND)
    assert bring_back(engine) == Recovered()
    found = row(engine, message_id)
    assert (found.parked, found.last_error) == (False, None)
    assert take(engine, message_id).attempt == 1


def test_a_claim_needs_no_recovery_to_unpark_first(engine: Engine) -> None:
    message_id = enqueue(engine)
    bring_back(engine, "other")
    assert row(engine, message_id).parked
    take_due(engine)
    found = row(engine, message_id)
    assert (found.state, found.parked, found.last_error) == ("Processing", False, None)


def test_only_messages_that_wait_are_parked(engine: Engine) -> None:
    made = enqueue_many(engine, 4)
    for message_id, state in zip(made, ("Publishing", "Published", "Processing", "Completed"), strict=True):
        set_state(engine, message_id, state)
    assert bring_back(engine) == Recovered()
    # Those that wait for their time are told of at once.
    end(engine, take(engine, made[0]), AttemptOutcome.FAILED, delay=500)
    assert bring_back(engine, "other") == Recovered(parked=1)


def test_thousands_of_an_unknown_kind_are_parked_a_thousand_at_a_time(engine: Engine) -> None:
    enqueue_many(engine, 1_500, "unknown")
    assert [bring_back(engine).parked for _ in range(3)] == [1_000, 500, 0]


def test_a_kind_is_remembered_for_a_day_after_its_last_server(engine: Engine) -> None:
    serve(engine, "old", "older", KIND)
    forget_server(engine, "worker 1")
    run(engine, "UPDATE outbox.job_servers SET seen_at = now() - interval '23 hours' WHERE kind = 'old'")
    run(engine, "UPDATE outbox.job_servers SET seen_at = now() - interval '25 hours' WHERE kind = 'older'")
    old, older = enqueue(engine, "old"), enqueue(engine, "older")
    assert bring_back(engine, "other") == Recovered(parked=1)
    assert (row(engine, old).parked, row(engine, older).parked) == (False, True)
    assert [one.kind for one in rows(engine, "SELECT kind FROM outbox.job_servers ORDER BY kind")] == ["old", KIND]


# Who serves


def test_what_a_server_says_of_itself_is_kept_by_the_databases_clock(engine: Engine) -> None:
    with engine.begin() as connection:
        served = [Served("b", 4, 3, 2, progress_age=90), Served("a", 1, progress_age=0.5)]
        note_served(connection, "w", served, listening=True)
    query = """
        SELECT *, extract(epoch FROM clock_timestamp() - progressed_at)::float8 AS age,
               extract(epoch FROM clock_timestamp() - seen_at)::float8 AS seen
        FROM outbox.job_servers ORDER BY kind
    """
    a, b = rows(engine, query)
    assert (b.server, b.listening, b.consumers, b.running, b.prefetched) == ("w", True, 4, 3, 2)
    assert 90 <= b.age < 100
    assert (a.kind, a.consumers, a.running) == ("a", 1, 0)
    with engine.begin() as connection:
        note_served(connection, "w", [Served("b", 4, progress_age=500)])
    b = rows(engine, query)[1]
    # Progress that was made stays made.
    assert 90 <= b.age < 110
    assert (b.running, b.listening) == (0, False)
    assert b.seen < 10
    forget_server(engine, "w")
    assert [(one.consumers, one.listening) for one in rows(engine, query)] == [(0, False)] * 2


def test_servers_that_note_the_same_kinds_at_once_do_not_wait_in_a_circle(engine: Engine) -> None:
    def note(place: int) -> None:
        kinds = [Served(f"kind {number}", 1) for number in range(30)]
        for turn in range(10):
            with engine.begin() as connection:
                note_served(connection, f"worker {place % 2}", kinds[::-1] if turn % 2 else kinds)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(note, range(4)))
    assert value(engine, "SELECT count(*) FROM outbox.job_servers") == 60


@pytest.mark.parametrize(
    ("done", "words"),
    [
        (Recovered(), "nothing to recover"),
        (Recovered(lost_leases=1), "1 lost lease recovered"),
        (Recovered(2, 3), "2 lost leases recovered; 3 lost publishes taken back"),
        (Recovered(parked=1), "1 message parked: nobody has registered their kind"),
        (
            Recovered(parked=4, orphans=5),
            "4 messages parked: nobody has registered their kind; 5 orphans given a message",
        ),
        (Recovered(problems=["kind a: no"]), "kind a: no"),
    ],
)
def test_a_recovery_tells_the_facts_in_a_line(done: Recovered, words: str) -> None:
    assert done.words() == words


def test_ones_own_kinds_are_never_parked(engine: Engine) -> None:
    message_id = enqueue(engine)
    assert bring_back(engine) == Recovered()
    assert not row(engine, message_id).parked
