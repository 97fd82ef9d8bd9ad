from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from outbox_pipelines.ml_service.server import MlServer
from outbox_pipelines.ml_service.training_pb2 import Example

from .client import Client, refused
from .rows import OTHER_TENANT, QUESTIONS, TENANT, answers, batches, directly_trained, rows


def test_training_through_the_service_gives_the_model_of_direct_training(client: Client) -> None:
    sent = rows(200)
    for batch in batches(sent):
        assert list(client.train(batch).accepted) == [example.id for example in batch]
    predicted = client.predict()
    assert list(predicted.probabilities) == answers(directly_trained(sent))
    assert predicted.examples_seen == 200


def test_an_example_sent_twice_is_learned_once(client: Client) -> None:
    sent = rows(10)
    first = client.train(sent)
    again = client.train(sent)
    assert list(again.accepted) == list(first.accepted) == list(range(1, 11))
    predicted = client.predict()
    assert predicted.examples_seen == 10
    assert list(predicted.probabilities) == answers(directly_trained(sent))


def test_an_example_twice_in_one_batch_is_learned_once(client: Client) -> None:
    one, two = rows(2)
    assert list(client.train([one, two, one]).accepted) == [1, 2]
    assert client.predict().examples_seen == 2


def test_a_batch_that_overlaps_an_earlier_one_adds_only_what_is_new(client: Client) -> None:
    sent = rows(15)
    client.train(sent[:10])
    assert list(client.train(sent[5:]).accepted) == list(range(6, 16))
    assert list(client.predict().probabilities) == answers(directly_trained(sent))


def test_a_lower_id_that_arrives_late_is_learned(client: Client) -> None:
    late, early = rows(5, first_id=1), rows(5, first_id=6)
    client.train(early)
    assert list(client.train(late).accepted) == [1, 2, 3, 4, 5]
    predicted = client.predict()
    assert predicted.examples_seen == 10
    assert list(predicted.probabilities) == answers(directly_trained([*early, *late]))


def test_bad_rows_are_rejected_with_a_reason_and_the_good_ones_learned(client: Client) -> None:
    good = rows(4)
    bad = Example(id=77, json='{"features": {"age": "forty"}, "label": true}')
    broken = Example(id=78, json="{")
    judged = client.train([*good[:2], bad, broken, *good[2:]])
    assert list(judged.accepted) == [1, 2, 3, 4]
    assert [(r.id, r.reason) for r in judged.rejected] == [
        (77, "feature 'age' is neither a number nor a boolean"),
        (78, "is not valid JSON (at character 1)"),
    ]
    assert list(client.predict().probabilities) == answers(directly_trained(good))


def test_a_rejected_row_that_was_repaired_is_learned(client: Client) -> None:
    (row,) = rows(1, first_id=5)
    assert [r.id for r in client.train([Example(id=5, json="{}")]).rejected] == [5]
    assert list(client.train([row]).accepted) == [5]


def test_an_id_gets_one_judgement_in_a_batch(client: Client) -> None:
    (row,) = rows(1, first_id=5)
    judged = client.train([Example(id=5, json="{}"), row])
    assert (list(judged.accepted), [r.id for r in judged.rejected]) == ([], [5])


def test_a_known_id_stays_accepted_whatever_it_says_now(client: Client) -> None:
    client.train(rows(1, first_id=5))
    judged = client.train([Example(id=5, json="{}")])
    assert (list(judged.accepted), list(judged.rejected)) == ([5], [])


def test_an_empty_batch_is_judged_and_leaves_no_file(client: Client, state_dir: Path) -> None:
    judged = client.train([])
    assert (list(judged.accepted), list(judged.rejected)) == ([], [])
    assert not list(state_dir.glob("*.state"))


def test_tenants_learn_apart(client: Client) -> None:
    mine, theirs = rows(50, seed=1), rows(50, seed=2)
    client.train(mine, TENANT)
    client.train(theirs, OTHER_TENANT)
    assert list(client.predict(tenant=TENANT).probabilities) == answers(directly_trained(mine))
    assert list(client.predict(tenant=OTHER_TENANT).probabilities) == answers(directly_trained(theirs))


def test_an_unknown_tenant_gets_an_untrained_model_s_answers(client: Client, state_dir: Path) -> None:
    predicted = client.predict(tenant="nobody")
    assert list(predicted.probabilities) == [0.5] * len(QUESTIONS)
    assert predicted.examples_seen == 0
    assert not list(state_dir.glob("*.state"))


def test_asking_with_bad_features_names_which(client: Client) -> None:
    with pytest.raises(grpc.RpcError) as error:
        client.predict(['{"a": 1}', '{"a": "one"}', "{"])
    assert refused(error) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "features[1]: feature 'a' is neither a number nor a boolean",
    )


def test_a_request_without_a_tenant_blames_no_row(client: Client) -> None:
    for call in (lambda: client.train(rows(1), tenant=""), lambda: client.predict(tenant="")):
        with pytest.raises(grpc.RpcError) as error:
            call()
        assert refused(error) == (grpc.StatusCode.FAILED_PRECONDITION, "the request names no tenant")


def test_a_batch_above_the_message_limit_is_refused_whole(state_dir: Path) -> None:
    with MlServer(state_dir=state_dir, max_message_bytes=1000) as server, Client(server.port) as client:
        with pytest.raises(grpc.RpcError) as error:
            client.train(rows(100))
        assert refused(error)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert client.predict().examples_seen == 0
        client.train(rows(3))


def test_a_state_that_cannot_be_saved_is_internal_and_the_retry_is_right(client: Client, state_dir: Path) -> None:
    sent = rows(20)
    client.train(sent[:10])
    obstacle = state_dir / f"{TENANT}.new"  # where the new state is written first
    obstacle.mkdir()
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as error:
            client.train(sent[10:])
        code, details = refused(error)
        assert code is grpc.StatusCode.INTERNAL
        assert f"{TENANT}.state cannot be written" in details
        assert client.predict().examples_seen == 10
    obstacle.rmdir()
    assert list(client.train(sent[10:]).accepted) == list(range(11, 21))
    assert list(client.predict().probabilities) == answers(directly_trained(sent))


def test_a_damaged_state_is_internal_until_it_is_restored(client: Client, state_dir: Path) -> None:
    with MlServer(state_dir=state_dir / "elsewhere") as other, Client(other.port) as elsewhere:
        elsewhere.train(rows(10))
        good = (state_dir / "elsewhere" / f"{TENANT}.state").read_bytes()
    file = state_dir / f"{TENANT}.state"
    file.write_bytes(good[:-20])
    for call in (lambda: client.train(rows(10)), client.predict):
        with pytest.raises(grpc.RpcError) as error:
            call()
        code, details = refused(error)
        assert code is grpc.StatusCode.INTERNAL
        assert str(file) in details
        assert "restore it from a backup" in details
    client.train(rows(5), OTHER_TENANT)  # others go on
    file.write_bytes(good)
    assert client.predict().examples_seen == 10


def test_an_unexpected_error_tells_the_caller_nothing_of_the_payload(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_state: object, _examples: object) -> None:
        raise RuntimeError("a value of the payload")

    with monkeypatch.context() as patched:
        patched.setattr("outbox_pipelines.ml_service.servicer.learn_batch", broken)
        with pytest.raises(grpc.RpcError) as error:
            client.train(rows(1))
    assert refused(error) == (grpc.StatusCode.INTERNAL, "unexpected error; the service's log has it")
    assert list(client.train(rows(1)).accepted) == [1]


def test_batches_of_one_tenant_at_once_lose_nothing(client: Client, state_dir: Path) -> None:
    sent = rows(400)
    with ThreadPoolExecutor(8) as senders:
        judged = list(senders.map(client.train, batches(sent) * 2))  # each batch twice, at the same time
    assert sorted({id_ for each in judged for id_ in each.accepted}) == list(range(1, 401))
    assert client.predict().examples_seen == 400
    record = json.loads((state_dir / f"{TENANT}.state").read_bytes().splitlines()[1])
    assert record["learned"] == [[1, 400]]


def test_predictions_while_training_are_of_whole_batches(client: Client) -> None:
    sent = batches(rows(300))
    with ThreadPoolExecutor(2) as callers:
        training = callers.submit(lambda: [client.train(batch) for batch in sent])
        while not training.done():
            predicted = client.predict()
            assert predicted.examples_seen % 10 == 0
            assert all(math.isfinite(p) for p in predicted.probabilities)
        training.result()
