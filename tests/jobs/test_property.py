"""Whatever happens in whatever order: no message is lost or completed twice, and only a token's holder writes.

A small model of the table is kept beside the real one, and both are compared after each step.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import Engine, create_engine, text

from outbox_pipelines.jobs.actions import NotPossible, UnknownMessage, cancel, retry
from outbox_pipelines.jobs.context import JobContext
from outbox_pipelines.jobs.enqueue import enqueue_job
from outbox_pipelines.jobs.kinds import Kinds
from outbox_pipelines.jobs.message import AttemptOutcome, Claimed, NotClaimed, Refusal, Settlement
from outbox_pipelines.jobs.outbox import claim_due, claim_message, claimed_under, expire_dead, note_progress
from outbox_pipelines.jobs.publisher import confirm, publish, take_back
from outbox_pipelines.jobs.recovery import recover
from outbox_pipelines.jobs.runner import settle_with_domain
from outbox_pipelines.jobs.transport import Published
from outbox_pipelines.lease.lease import LeaseLost, renew
from tests.jobs.messages import APP_JOBS, a_kind, age_publishes, let_expire, make_app_jobs, make_due, run

KINDS = Kinds([a_kind("plain", attempts=3, consumers=3), a_kind("bound", attempts=2, consumers=2, domain=APP_JOBS)])
WORKERS = ("A", "B", "C")
LEASE_SECONDS = 3_600.0
LATER = timedelta(hours=1)

TABLES = ("outbox.messages", "outbox.job_attempts", "app.jobs", "app.effects")
UNKNOWN = 1_000_000

PICK = st.integers(0, 30)


@dataclass
class Model:
    """What a message's row must be."""

    kind: str
    unique_key: str | None
    job_id: int | None
    due: bool = True
    state: str = "Pending"
    outcome: str | None = None
    token: UUID | None = None
    publish_token: UUID | None = None
    expired: bool = False
    published_long_ago: bool = False
    attempts: int = 0
    claims: int = 0
    lost: int = 0
    ledger: list[tuple[int, int, str]] = field(default_factory=list)
    executed: int = 0
    """Attempts that a handler was called for, but for interrupted ones; since the last retry."""

    domain_status: str = "queued"

    def claim(self, token: UUID, limit: int) -> None:
        self.state, self.token, self.publish_token, self.expired = "Processing", token, None, False
        self.attempts += 1
        self.claims += 1
        self.executed += self.attempts <= limit

    def end_claim(self, outcome: AttemptOutcome) -> None:
        self.ledger.append((self.claims, self.attempts, str(outcome)))
        self.token, self.expired = None, False

    def lose(self) -> None:
        self.end_claim(AttemptOutcome.LOST)
        self.state, self.lost = "Pending", self.lost + 1

    def complete(self, outcome: str) -> None:
        self.state, self.outcome = "Completed", outcome
        if outcome != "succeeded" and self.domain_status == "queued":
            self.domain_status = outcome

    def care(self, limit: int) -> int:
        last = self.attempts + 1 >= limit
        return 2 if self.lost >= 2 or (self.lost == 1 and last) else 1 if self.lost == 1 or last else 0


class Outbox(RuleBasedStateMachine):
    """The real functions on a real database, beside the model."""

    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        # Faster than TRUNCATE, for so few rows.
        run(self.engine, ";".join(f"DELETE FROM {one}" for one in TABLES))
        self.model: dict[int, Model] = {}
        self.claims: list[tuple[str, Claimed]] = []
        """All that were ever made, with their worker: nobody is told when one has ended."""
        self.published: list[Published] = []
        self.effects: list[int] = []

    def _at(self, pick: int, *, mostly: str | None = None, or_unknown: bool = False) -> int:
        preferred = [one for one, model in self.model.items() if mostly in {model.state, model.outcome}]
        if preferred and pick % 4:
            return preferred[pick % len(preferred)]
        ids = [*self.model, *([UNKNOWN] if or_unknown else [])]
        return ids[pick % len(ids)]

    def _claim_at(self, pick: int) -> tuple[str, Claimed]:
        """Three of four are current, if any is."""
        current = [one for one in self.claims if self._is_current(one[1])] if pick % 4 else []
        return (current or self.claims)[pick % len(current or self.claims)]

    def _published_at(self, pick: int) -> Published:
        """Three of four are awaited by their message, or were before it was published again."""
        awaited = [one for one in self.published if self.model[one.message_id].publish_token] if pick % 4 else []
        return (awaited or self.published)[pick % len(awaited or self.published)]

    # The application

    @rule(
        kind=st.sampled_from(list(KINDS)),
        key=st.sampled_from([None, None, "k"]),
        later=st.sampled_from([False] * 3 + [True]),
    )
    def enqueue(self, kind: str, key: str | None, later: bool) -> None:
        live = [
            one
            for one, model in self.model.items()
            if key is not None and (model.kind, model.unique_key) == (kind, key) and model.state != "Completed"
        ]
        with self.engine.begin() as connection:
            job_id = None
            if kind == "bound" and not live:
                job_id = connection.execute(text("INSERT INTO app.jobs DEFAULT VALUES RETURNING id")).scalar_one()
            made = enqueue_job(
                connection, kind, job_id=job_id, unique_key=key, run_at=datetime.now(UTC) + LATER if later else None
            )
        assert made.is_new is not bool(live)
        if live:
            assert [made.message_id] == live
        else:
            self.model[made.message_id] = Model(kind, key, job_id, due=not later)

    # The publisher

    @rule(kind=st.sampled_from(list(KINDS)))
    def publish(self, kind: str) -> None:
        mine = [model for model in self.model.values() if model.kind == kind]
        due = [model for model in mine if model.state == "Pending" and model.due]
        in_flight = [model for model in mine if model.state in {"Publishing", "Published", "Processing"}]
        with self.engine.begin() as connection:
            published = publish(connection, KINDS[kind])
        assert len(published) == min(len(due), max(0, KINDS[kind].consumers - len(in_flight)))
        for one in published:
            model = self.model[one.message_id]
            assert model in due
            assert one.attempt == model.attempts + 1
            model.state, model.publish_token, model.published_long_ago = "Publishing", one.token, False
            assert one.run_key not in {earlier.run_key for earlier in self.published}
            self.published.append(one)

    @rule(kind=st.sampled_from(list(KINDS)))
    def publish_again(self, kind: str) -> None:
        """No run came for the first time; whoever asked for it may still not know."""
        self.publish(kind)
        self.publishes_grow_old()
        self.recover(by_a_worker=True)
        self.publish(kind)
        for one in [one for one in self.published if self.model[one.message_id].publish_token not in {None, one.token}]:
            self._confirm(one)

    @precondition(lambda self: self.published)
    @rule(pick=PICK)
    def confirm(self, pick: int) -> None:
        self._confirm(self._published_at(pick))

    def _confirm(self, one: Published) -> None:
        model = self.model[one.message_id]
        awaited = model.state == "Publishing" and model.publish_token == one.token
        with self.engine.begin() as connection:
            assert confirm(connection, [one]) == awaited
        if awaited:
            model.state = "Published"

    @precondition(lambda self: self.published)
    @rule(pick=PICK)
    def take_back(self, pick: int) -> None:
        one = self._published_at(pick)
        model = self.model[one.message_id]
        awaited = model.publish_token == one.token
        with self.engine.begin() as connection:
            assert take_back(connection, one, "no run came", lost=1) == awaited
            if awaited:
                # Longer than an example may take.
                connection.execute(
                    text(
                        "UPDATE outbox.messages SET available_at = available_at + interval '1 h' WHERE message_id = :id"
                    ),
                    {"id": one.message_id},
                )
        if awaited:
            model.state, model.publish_token, model.due = "Pending", None, False

    # Workers

    @rule(worker=st.sampled_from(WORKERS), pick=PICK, kind=st.sampled_from(list(KINDS)), again=st.booleans())
    def claim(self, worker: str, pick: int, kind: str, again: bool) -> None:
        message_id = self._at(pick, or_unknown=True)
        model, token = self.model.get(message_id), uuid4()
        if model is not None and pick % 7:
            kind = model.kind
        with self.engine.begin() as connection:
            found = claim_message(connection, message_id, kind=kind, holder=worker, seconds=LEASE_SECONDS, token=token)
        if model is not None and model.expired:
            model.lose()
        if (
            model is None
            or model.kind != kind
            or model.state in {"Processing", "Completed"}
            or (model.state == "Pending" and not model.due)
        ):
            assert isinstance(found, NotClaimed)
            assert found.why is (
                Refusal.UNKNOWN
                if model is None
                else Refusal.OTHER_KIND
                if model.kind != kind
                else {"Processing": Refusal.HELD, "Completed": Refusal.COMPLETED, "Pending": Refusal.NOT_DUE}[
                    model.state
                ]
            )
            return
        self._claimed(worker, found, token)
        if again:
            # Its answer was lost, and it is asked for again.
            with self.engine.begin() as connection:
                repeated = claim_message(
                    connection, message_id, kind=kind, holder=worker, seconds=LEASE_SECONDS, token=token
                )
            assert isinstance(repeated, Claimed)
            assert (repeated.attempt, repeated.claim) == (model.attempts, model.claims)

    @rule(
        worker=st.sampled_from(WORKERS),
        kind=st.sampled_from(list(KINDS)),
        limit=st.integers(1, 5),
        ready=st.integers(0, 3),
        alone=st.booleans(),
    )
    def claim_due(self, worker: str, kind: str, limit: int, ready: int, alone: bool) -> None:
        attempts, token = KINDS[kind].attempts, uuid4()
        with self.engine.begin() as connection:
            by_age = connection.execute(
                text("SELECT message_id FROM outbox.messages ORDER BY available_at, message_id")
            ).scalars()
            expected = self._taken(kind, list(by_age), limit, ready, alone)
            found = claim_due(
                connection,
                kind,
                limit=limit,
                ready=ready,
                alone=alone,
                attempts=attempts,
                holder=worker,
                seconds=LEASE_SECONDS,
                token=token,
            )
            known = claimed_under(connection, kind, token=token, seconds=LEASE_SECONDS)
        assert [one.message_id for one in found] == expected
        assert sorted(one.message_id for one in known) == sorted(expected)
        for one in found:
            assert one.care == self.model[one.message_id].care(attempts)
            self._claimed(worker, one, token)

    def _taken(self, kind: str, by_age: list[int], limit: int, ready: int, alone: bool) -> list[int]:
        """What a worker is given: no more that must not wait than it has consumers free, of those to be alone one."""
        care = {one: model.care(KINDS[kind].attempts) for one, model in self.model.items()}
        most = 0 if ready < 1 else 2 if alone else 1
        due = [
            one
            for one in by_age
            if self.model[one].kind == kind
            and self.model[one].state == "Pending"
            and self.model[one].due
            and care[one] <= most
        ][:limit]
        to_be_alone = [one for one in due if care[one] == 2][1:]
        careful = [one for one in due if care[one] > 0 and one not in to_be_alone][:ready]
        return sorted(
            [one for one in due if care[one] == 0 or one in careful], key=lambda one: (-care[one], by_age.index(one))
        )

    def _claimed(self, worker: str, found: Claimed | NotClaimed, token: UUID) -> None:
        assert isinstance(found, Claimed)
        model = self.model[found.message_id]
        limit = KINDS[model.kind].attempts
        model.claim(token, limit)
        assert (found.attempt, found.claim) == (model.attempts, model.claims)
        assert model.executed <= limit
        self.claims.append((worker, found))

    @precondition(lambda self: self.claims)
    @rule(
        picks=st.lists(PICK, min_size=1, max_size=4),
        outcome=st.sampled_from(
            [
                AttemptOutcome.SUCCEEDED,
                AttemptOutcome.FAILED,
                AttemptOutcome.FAILED,
                AttemptOutcome.GIVEN_UP,
                AttemptOutcome.INTERRUPTED,
            ]
        ),
        at_once=st.booleans(),
    )
    def settle(self, picks: list[int], outcome: AttemptOutcome, at_once: bool) -> None:
        """By whoever once had them, in one batch for a kind."""
        chosen = [self._claim_at(pick)[1] for pick in picks]
        kind = KINDS[chosen[0].kind]
        chosen = list({one.lease: one for one in chosen if one.kind == kind.name}.values())
        ends = []
        for one in chosen:
            how = outcome
            if one.attempt > kind.attempts or (outcome is AttemptOutcome.FAILED and one.attempt == kind.attempts):
                how = AttemptOutcome.GIVEN_UP
            ends.append(Settlement(one, how, "why", 0.0 if at_once else LATER.total_seconds()))
        self._settle(kind.name, ends)

    def _settle(self, kind: str, ends: list[Settlement]) -> None:
        with self.engine.begin() as connection:
            done = settle_with_domain(connection, KINDS[kind], ends, holder="settler")
        assert done == {end.claimed.message_id for end in ends if self._is_current(end.claimed)}
        for end in ends:
            if not self._is_current(end.claimed):
                continue
            model = self.model[end.claimed.message_id]
            model.end_claim(end.outcome)
            if end.outcome is AttemptOutcome.SUCCEEDED:
                model.complete("succeeded")
            elif end.outcome is AttemptOutcome.GIVEN_UP:
                model.complete("failed")
            else:
                model.state = "Pending"
                if end.outcome is AttemptOutcome.INTERRUPTED:
                    model.executed -= model.attempts <= KINDS[kind].attempts
                    model.attempts -= 1
                else:
                    model.due = end.delay == 0

    def _is_current(self, claimed: Claimed) -> bool:
        return self.model[claimed.message_id].token == claimed.lease.token

    @precondition(lambda self: self.claims)
    @rule(pick=PICK, commits=st.booleans())
    def complete_in(self, pick: int, commits: bool) -> None:
        worker, claimed = self._claim_at(pick)
        job = JobContext(
            claimed, engine=self.engine, domain=None, holder=worker, on_progress=lambda _step, _fraction: None
        )
        current = self._is_current(claimed)
        try:
            with self.engine.begin() as connection:
                connection.execute(text("INSERT INTO app.effects VALUES (:id)"), {"id": claimed.message_id})
                job.complete_in(connection)
                if not commits:
                    raise RuntimeError
        except LeaseLost:
            assert not current
        except RuntimeError:
            assert current
        else:
            assert current
            model = self.model[claimed.message_id]
            model.end_claim(AttemptOutcome.SUCCEEDED)
            model.complete("succeeded")
            self.effects.append(claimed.message_id)

    @precondition(lambda self: self.claims)
    @rule(picks=st.lists(PICK, min_size=1, max_size=4))
    def heartbeat(self, picks: list[int]) -> None:
        chosen = [self._claim_at(pick)[1] for pick in picks]
        leases = {claimed.lease: claimed for claimed in chosen}
        with self.engine.begin() as connection:
            renewal = renew(connection, leases)
        current = {lease for lease, claimed in leases.items() if self._is_current(claimed)}
        assert (renewal.renewed, renewal.lost) == (current, set(leases) - current)
        for lease in current:
            self.model[lease.key].expired = False

    @precondition(lambda self: self.claims)
    @rule(pick=PICK)
    def progress(self, pick: int) -> None:
        _, claimed = self._claim_at(pick)
        with self.engine.begin() as connection:
            assert note_progress(connection, claimed, f"step of {claimed.lease.token}", 0.5) == self._is_current(
                claimed
            )

    @rule(worker=st.sampled_from(WORKERS))
    def kill(self, worker: str) -> None:
        """The worker forgets everything, and its keeper gives back what it held."""
        its = [claimed for holder, claimed in self.claims if holder == worker]
        with self.engine.begin() as connection:
            given_back = expire_dead(connection, [claimed.lease for claimed in its])
        current = [claimed.message_id for claimed in its if self._is_current(claimed)]
        assert sorted(given_back) == sorted(current)
        for message_id in current:
            self.model[message_id].lose()

    # Time, and recovery

    @precondition(lambda self: self.model)
    @rule(pick=PICK)
    def lease_ends(self, pick: int) -> None:
        message_id = self._at(pick, mostly="Processing")
        let_expire(self.engine, message_id)
        if self.model[message_id].state == "Processing":
            self.model[message_id].expired = True

    @rule()
    def backoffs_end(self) -> None:
        make_due(self.engine)
        for model in self.model.values():
            model.due = model.due or model.state == "Pending"

    @rule()
    def publishes_grow_old(self) -> None:
        age_publishes(self.engine)
        for model in self.model.values():
            model.published_long_ago = model.publish_token is not None

    @rule(by_a_worker=st.booleans())
    def recover(self, by_a_worker: bool) -> None:
        expired = [model for model in self.model.values() if model.expired]
        old = [
            model
            for model in self.model.values()
            if model.publish_token is not None
            and model.published_long_ago
            and (by_a_worker or model.state == "Publishing")
        ]
        done = recover(self.engine, KINDS, publish_timeout=60, also_published=by_a_worker)
        assert (done.lost_leases, done.lost_publishes) == (len(expired), len(old))
        for model in expired:
            model.lose()
        for model in old:
            model.state, model.publish_token = "Pending", None

    # People

    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        message_id = self._at(pick, mostly="Processing", or_unknown=True)
        model = self.model.get(message_id)
        try:
            with self.engine.begin() as connection:
                before = cancel(connection, KINDS, message_id)
        except UnknownMessage:
            assert model is None
        except NotPossible:
            assert model is not None
            assert model.state == "Completed"
        else:
            assert model is not None
            assert before == model.state
            if model.state == "Processing":
                model.end_claim(AttemptOutcome.CANCELLED)
            model.publish_token = None
            model.complete("cancelled")

    @precondition(lambda self: self.model)
    @rule(pick=PICK)
    def retry(self, pick: int) -> None:
        message_id = self._at(pick, mostly="failed" if pick % 2 else "cancelled")
        model = self.model[message_id]
        twin = any(
            one is not model
            and one.unique_key is not None
            and (one.kind, one.unique_key) == (model.kind, model.unique_key)
            and one.state != "Completed"
            for one in self.model.values()
        )
        anew = model.state == "Completed" and model.outcome != "succeeded" and not twin
        try:
            with self.engine.begin() as connection:
                retry(connection, KINDS, message_id)
        except NotPossible:
            assert not anew
            assert model.state != "Pending"
        else:
            assert anew or model.state == "Pending"
            model.due = True
            if anew:
                model.state, model.outcome, model.attempts, model.lost, model.executed = "Pending", None, 0, 0, 0
                model.domain_status = "queued"

    # What holds always

    @invariant()
    def the_table_is_as_the_model_has_it(self) -> None:
        with self.engine.connect() as connection:
            found = connection.execute(
                text("""
                    SELECT message_id, state, outcome, lease_token, publish_token, processing_attempts, claims,
                           lost_leases, available_at <= clock_timestamp() AS due, step
                    FROM outbox.messages ORDER BY message_id
                """)
            ).all()
            lines = connection.execute(
                text("SELECT message_id, claim, attempt, outcome FROM outbox.job_attempts ORDER BY message_id, claim")
            ).all()
        assert [row.message_id for row in found] == sorted(self.model), "a message was lost"
        for row in found:
            model = self.model[row.message_id]
            tokens = (row.lease_token, row.publish_token)
            assert (row.state, row.outcome, *tokens) == (model.state, model.outcome, model.token, model.publish_token)
            counted = (row.processing_attempts, row.claims, row.lost_leases)
            assert counted == (model.attempts, model.claims, model.lost)
            if row.state == "Pending":
                assert row.due == model.due
            if row.state == "Processing":
                assert row.step in {None, f"step of {model.token}"}, "another than the holder wrote"
        for message_id, model in self.model.items():
            assert [tuple(line)[1:] for line in lines if line.message_id == message_id] == model.ledger
            assert len(model.ledger) == model.claims - (model.token is not None), "a line for each claim that ended"
            assert sum(outcome == "succeeded" for _, _, outcome in model.ledger) == (model.outcome == "succeeded")

    def teardown(self) -> None:
        """Time passes and a worker comes: every message is completed."""
        self.publishes_grow_old()
        let_expire(self.engine)
        for model in self.model.values():
            model.expired = model.token is not None
        self.recover(by_a_worker=True)
        for _ in range(3 * len(self.model)):
            self.backoffs_end()
            for kind in KINDS:
                self.claim_due("A", kind, 5, 3, True)
                mine = [one for _, one in self.claims if one.kind == kind and self._is_current(one)]
                limit = KINDS[kind].attempts
                self._settle(
                    kind,
                    [
                        Settlement(
                            one, AttemptOutcome.GIVEN_UP if one.attempt > limit else AttemptOutcome.SUCCEEDED, None
                        )
                        for one in mine
                    ],
                )
            if all(model.state == "Completed" for model in self.model.values()):
                break
        self.the_table_is_as_the_model_has_it()
        assert {model.state for model in self.model.values()} <= {"Completed"}, "a message is stuck"
        with self.engine.connect() as connection:
            effects = connection.execute(text("SELECT message_id FROM app.effects")).scalars().all()
            jobs = dict(iter(connection.execute(text("SELECT id, status FROM app.jobs")).all()))
        assert sorted(effects) == sorted(self.effects)
        assert len(set(self.effects)) == len(self.effects), "an effect was had twice"
        assert jobs == {model.job_id: model.domain_status for model in self.model.values() if model.job_id is not None}


@pytest.mark.timeout(600)
def test_no_message_is_lost_or_done_twice_in_any_order_of_events(engine: Engine, database_url: str) -> None:
    make_app_jobs(engine)
    run(engine, "CREATE TABLE app.effects (message_id bigint)")

    class OnThisDatabase(Outbox):
        pass

    # Without the product's question at each checkout whether the connection lives.
    OnThisDatabase.engine = create_engine(database_url, use_native_hstore=False)
    run_state_machine_as_test(
        OnThisDatabase,
        settings=settings(
            max_examples=300,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
    OnThisDatabase.engine.dispose()
