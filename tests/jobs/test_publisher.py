"""Publishing: as many runs as places are free, and a message whose run never comes is published again."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, text

from outbox_pipelines.jobs.kinds import JobKind
from outbox_pipelines.jobs.message import AttemptOutcome, NotClaimed
from outbox_pipelines.jobs.publisher import Polled, Publisher, confirm, publish, take_back
from outbox_pipelines.jobs.transport import Fate, Published
from tests.jobs.messages import (
    a_kind,
    age_publishes,
    ask_for,
    complete,
    end,
    enqueue,
    enqueue_many,
    ledger,
    make_due,
    row,
    run,
    set_state,
    states,
    take,
    value,
)
from tests.lease.leased_things import waiting_for_locks
from tests.outboxes import wait_until

TIMEOUT = 120.0


class MemoryRuns:
    """Runs in memory, whose fates the test decides."""

    def __init__(self, *, appear: Fate = Fate.ON_ITS_WAY) -> None:
        self.requested: list[Published] = []
        self.known: dict[str, Fate] = {}
        self.asked: list[str] = []
        self.failing = False
        self._appear = appear

    def fates(self, published: Sequence[Published]) -> Mapping[str, Fate]:
        self.asked = [one.run_key for one in published]
        return {one.run_key: self.known[one.run_key] for one in published if one.run_key in self.known}

    def request(self, published: Sequence[Published]) -> None:
        if self.failing:
            raise ConnectionError("the daemon died")
        self.requested += published
        self.known |= {one.run_key: self._appear for one in published}

    def keys(self) -> list[str]:
        """The run keys that were asked for, in order."""
        return [one.run_key for one in self.requested]


def poll(engine: Engine, runs: MemoryRuns, kind: JobKind | None = None) -> Polled:
    """A tick of the kind's sensor."""
    return Publisher(engine, runs, timeout=TIMEOUT).poll(kind or a_kind())


def test_as_many_are_published_as_places_are_free(engine: Engine) -> None:
    kind, runs = a_kind(consumers=6), MemoryRuns()
    for state in ("Publishing", "Published", "Processing", "Completed"):
        set_state(engine, enqueue(engine), state)
    set_state(engine, enqueue(engine, "other"), "Processing")
    waiting = enqueue_many(engine, 9)
    runs.known = dict.fromkeys(("1:1", "2:1"), Fate.ON_ITS_WAY)
    assert poll(engine, runs, kind).published == 3
    assert [one.message_id for one in runs.requested] == waiting[:3]
    assert poll(engine, runs, kind).published == 0
    complete(engine, waiting[0])
    end(engine, take(engine, waiting[1]), AttemptOutcome.FAILED, delay=100)
    assert poll(engine, runs, kind).published == 2
    assert [one.message_id for one in runs.requested[3:]] == waiting[3:5]


def test_more_in_flight_than_places_publishes_nothing(engine: Engine) -> None:
    for message_id in enqueue_many(engine, 5):
        set_state(engine, message_id, "Processing")
    waiting = enqueue(engine)
    assert poll(engine, MemoryRuns(), a_kind(consumers=2)).published == 0
    assert states(engine)[waiting] == "Pending"


def test_the_most_urgent_due_messages_go_first(engine: Engine) -> None:
    late = enqueue(engine)
    old = enqueue(engine)
    run(engine, "UPDATE outbox.messages SET available_at = now() - interval '1 hour' WHERE message_id = :id", id=old)
    urgent = enqueue(engine, priority=9)
    not_due = enqueue(engine, priority=10)
    run(engine, "UPDATE outbox.messages SET available_at = now() + interval '1 hour' WHERE priority = 10")
    runs = MemoryRuns()
    poll(engine, runs, a_kind(consumers=2))
    assert [one.message_id for one in runs.requested] == [urgent, old]
    poll(engine, runs, a_kind(consumers=16))
    assert [one.message_id for one in runs.requested] == [urgent, old, late]
    assert states(engine)[not_due] == "Pending"


def test_a_published_message_shows_its_publish_and_names_its_attempt(engine: Engine) -> None:
    message_id = enqueue(engine)
    end(engine, take(engine, message_id), AttemptOutcome.FAILED)
    run(engine, "UPDATE outbox.messages SET parked = true")
    runs = MemoryRuns()
    poll(engine, runs)
    found = row(engine, message_id)
    assert runs.requested == [Published(message_id, 1, 2, found.publish_token)]
    assert (found.state, found.publish_attempts, found.parked) == ("Publishing", 1, False)
    assert (found.processing_attempts, found.lease_token) == (1, None)


def test_a_publisher_waits_for_another_of_its_kind_and_then_sees_what_it_took(engine: Engine) -> None:
    kind = a_kind(consumers=3)
    enqueue_many(engine, 9)
    enqueue(engine, "other")

    def publish_in_turn() -> int:
        with engine.begin() as connection:
            return len(publish(connection, kind))

    with ThreadPoolExecutor(2) as threads:
        with engine.begin() as connection:
            assert len(publish(connection, kind)) == 3
            second = threads.submit(publish_in_turn)
            wait_until(lambda: waiting_for_locks(engine) == 1)
            # One kind never waits for another.
            assert poll(engine, MemoryRuns(), a_kind("other")).published == 1
        assert second.result() == 0


def test_many_publishers_at_once_never_open_more_than_the_places(engine: Engine) -> None:
    kind, runs = a_kind(consumers=3), MemoryRuns()
    enqueue_many(engine, 60)
    query = "SELECT count(*) FROM outbox.messages WHERE state NOT IN ('Pending', 'Completed')"

    def poll_and_work(_: int) -> list[int]:
        seen = []
        for _round in range(6):
            poll(engine, runs, kind)
            seen.append(value(engine, query))
            for message_id, state in states(engine).items():
                if state in {"Publishing", "Published"}:
                    claimed = ask_for(engine, message_id)
                    assert isinstance(claimed, NotClaimed) or end(engine, claimed)
        return seen

    with ThreadPoolExecutor(4) as threads:
        seen = [count for counts in threads.map(poll_and_work, range(4)) for count in counts]
    assert 1 <= max(seen) <= 3
    assert len(runs.keys()) == len(set(runs.keys())) > 3


def test_a_run_that_was_seen_confirms_its_message(engine: Engine) -> None:
    message_id, runs = enqueue(engine), MemoryRuns()
    poll(engine, runs)
    assert poll(engine, runs) == Polled(0, confirmed=1, taken_back=0)
    assert states(engine)[message_id] == "Published"
    assert poll(engine, runs) == Polled(0, 0, 0)
    age_publishes(engine)
    # However long its run waits in a queue.
    assert poll(engine, runs) == Polled(0, 0, 0)
    assert take(engine, message_id).attempt == 1


@pytest.mark.parametrize("seen_before", [False, True])
def test_a_run_that_ended_without_claiming_gives_its_message_back_with_a_reason(
    engine: Engine, seen_before: bool
) -> None:
    message_id, runs = enqueue(engine), MemoryRuns()
    poll(engine, runs)
    if seen_before:
        poll(engine, runs)
    runs.known = {f"{message_id}:1": Fate.ENDED}
    assert poll(engine, runs) == Polled(0, 0, taken_back=1)
    found = row(engine, message_id)
    assert (found.state, found.publish_token) == ("Pending", None)
    assert found.last_error == f"run {message_id}:1 ended without claiming it; see that run"
    assert 0.5 < found.due_in <= 2
    assert ledger(engine, message_id) == []


@pytest.mark.parametrize("seen_before", [False, True])
def test_a_run_that_nobody_sees_is_waited_for_until_the_timeout(engine: Engine, seen_before: bool) -> None:
    message_id, runs = enqueue(engine), MemoryRuns()
    poll(engine, runs)
    if seen_before:
        poll(engine, runs)
    runs.known = {}
    age_publishes(engine, seconds=TIMEOUT - 30)
    assert poll(engine, runs) == Polled(0, 0, 0)
    age_publishes(engine, seconds=60)
    assert poll(engine, runs) == Polled(0, 0, taken_back=1)
    found = row(engine, message_id)
    assert (found.state, found.last_error) == ("Pending", f"no run {message_id}:1 came within 120 s")


def test_each_publish_has_a_key_of_its_own_and_the_pause_before_the_next_grows(engine: Engine) -> None:
    message_id, runs = enqueue(engine), MemoryRuns(appear=Fate.ENDED)
    pauses = []
    for _ in range(9):
        assert poll(engine, runs).published == 1
        assert poll(engine, runs) == Polled(0, 0, taken_back=1)
        pauses.append(row(engine, message_id).due_in)
        make_due(engine)
    assert runs.keys() == [f"{message_id}:{attempt}" for attempt in range(1, 10)]
    for place, pause in enumerate(pauses):
        longest = min(2 * 2**place, 300)
        assert longest * 0.7 < pause <= longest
    # Once it is claimed, the next publishes begin anew.
    found = row(engine, message_id)
    assert (found.publish_attempts, found.processing_attempts) == (9, 0)


def test_a_failed_attempt_gets_another_run_under_another_key(engine: Engine) -> None:
    message_id, runs = enqueue(engine), MemoryRuns()
    poll(engine, runs)
    end(engine, take(engine, message_id), AttemptOutcome.FAILED)
    runs.known = {f"{message_id}:1": Fate.ENDED}
    poll(engine, runs)
    assert [(one.run_key, one.attempt) for one in runs.requested] == [(f"{message_id}:1", 1), (f"{message_id}:2", 2)]


def test_a_crash_between_publishing_and_asking_for_the_runs_loses_nothing(engine: Engine) -> None:
    message_id, runs = enqueue(engine), MemoryRuns()
    runs.failing = True
    with pytest.raises(ConnectionError):
        poll(engine, runs)
    assert states(engine)[message_id] == "Publishing"
    runs.failing = False
    assert poll(engine, runs) == Polled(0, 0, 0)
    age_publishes(engine)
    assert poll(engine, runs).taken_back == 1
    make_due(engine)
    assert poll(engine, runs).published == 1
    assert runs.keys() == [f"{message_id}:2"]


def test_a_late_word_on_an_earlier_publish_changes_nothing(engine: Engine) -> None:
    message_id, runs = enqueue(engine), MemoryRuns()
    poll(engine, runs)
    first = runs.requested[0]
    with engine.begin() as connection:
        assert take_back(connection, first, "no run came", lost=1)
        make_due_at_once = text("UPDATE outbox.messages SET available_at = now()")
        connection.execute(make_due_at_once)
    poll(engine, runs)
    with engine.begin() as connection:
        assert confirm(connection, [first]) == 0
        assert not take_back(connection, first, "late", lost=1)
    found = row(engine, message_id)
    assert (found.state, found.publish_token) == ("Publishing", runs.requested[1].token)


@pytest.mark.parametrize("fate", Fate)
def test_a_message_that_was_claimed_meanwhile_is_left_to_its_worker(engine: Engine, fate: Fate) -> None:
    message_id = enqueue(engine)

    class ClaimedWhileAsked(MemoryRuns):
        def fates(self, published: Sequence[Published]) -> Mapping[str, Fate]:
            if published and states(engine)[message_id] == "Publishing":
                take(engine, message_id)
            return {one.run_key: fate for one in published}

    runs = ClaimedWhileAsked()
    poll(engine, runs)
    age_publishes(engine)
    assert poll(engine, runs) == Polled(0, 0, 0)
    assert states(engine)[message_id] == "Processing"


def test_only_messages_of_the_kind_that_wait_for_runs_are_asked_about(engine: Engine) -> None:
    set_state(engine, enqueue(engine, "other"), "Publishing")
    mine = [enqueue(engine, run_at=None) for _ in range(4)]
    for message_id, state in zip(mine, ("Publishing", "Published", "Processing", "Completed"), strict=True):
        set_state(engine, message_id, state)
    runs = MemoryRuns()
    poll(engine, runs)
    assert sorted(runs.asked) == [f"{mine[0]}:1", f"{mine[1]}:1"]


def test_the_pause_after_a_lost_publish_does_not_grow_with_interruptions(engine: Engine) -> None:
    message_id, runs = enqueue(engine), MemoryRuns()
    for _ in range(6):
        poll(engine, runs)
        end(engine, take(engine, message_id), AttemptOutcome.INTERRUPTED)
    poll(engine, runs)
    runs.known[runs.requested[-1].run_key] = Fate.ENDED
    assert poll(engine, runs).taken_back == 1
    assert 0 < row(engine, message_id).due_in <= 2
