from __future__ import annotations

import doctest
import json
import math
import os
import pickle
import subprocess
import sys
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox_pipelines.ml_service import id_ranges, model
from outbox_pipelines.ml_service.model import MAX_MAGNITUDE, OnlineModel, ParsedExample, parse_example

from .rows import answers, directly_trained, rows

VALUES = st.floats(-MAX_MAGNITUDE, MAX_MAGNITUDE) | st.integers(-3, 3).map(float)
FEATURES = st.dictionaries(st.sampled_from("abcde"), VALUES, min_size=1)
EXAMPLES = st.lists(st.builds(ParsedExample, features=FEATURES, label=st.booleans()), max_size=30)


def test_an_untrained_model_knows_nothing() -> None:
    untrained = OnlineModel()
    assert untrained.probability({"hours": 4.0}) == 0.5
    assert untrained.examples_seen == 0


def test_a_model_learns() -> None:
    learning = OnlineModel()
    for n in range(500):
        learning.learn(ParsedExample({"hours": float(n % 10)}, label=n % 10 >= 5))
    assert learning.examples_seen == 500
    assert learning.probability({"hours": 9.0}) > 0.8
    assert learning.probability({"hours": 0.0}) < 0.2


def test_the_order_of_keys_changes_no_bit() -> None:
    sent = rows(300)
    as_written, reordered = directly_trained(sent), OnlineModel()
    for example in sent:
        parsed = json.loads(example.json)
        parsed["features"] = dict(reversed(parsed["features"].items()))
        reordered.learn(parse_example(json.dumps(parsed)))
    assert reordered.to_record() == as_written.to_record()
    assert list(reordered.to_record()["weights"]) == list(as_written.to_record()["weights"])
    question = {"absences": 3.1, "hours": 1.7, "repeats": 1.0, "score": 9.3}
    backwards = dict(reversed(question.items()))
    assert reordered.probability(backwards) == as_written.probability(question)


def test_learning_does_not_depend_on_the_process() -> None:
    # Python's string hashes differ from one process to the next.
    script = (
        f"from {rows.__module__} import answers, directly_trained, rows\n"
        "print([answer.hex() for answer in answers(directly_trained(rows(200)))])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert said == {str([answer.hex() for answer in answers(directly_trained(rows(200)))])}


@settings(deadline=None)
@given(before=EXAMPLES, after=EXAMPLES, question=FEATURES)
def test_a_model_read_back_goes_on_bit_for_bit(
    before: list[ParsedExample], after: list[ParsedExample], question: dict[str, float]
) -> None:
    kept = OnlineModel()
    for example in before:
        kept.learn(example)
    read_back = OnlineModel.from_record(json.loads(json.dumps(kept.to_record())))
    for example in after:
        kept.learn(example)
        read_back.learn(example)
    assert read_back.probability(question) == kept.probability(question)
    assert json.dumps(read_back.to_record()) == json.dumps(kept.to_record())


@settings(deadline=None)
@given(examples=EXAMPLES, question=FEATURES)
def test_nothing_that_is_accepted_can_break_a_model(examples: list[ParsedExample], question: dict[str, float]) -> None:
    learning = OnlineModel()
    for example in examples:
        learning.learn(example)
    assert 0.0 <= learning.probability(question) <= 1.0
    assert json.dumps(learning.to_record(), allow_nan=False)


def test_asking_teaches_nothing() -> None:
    asked, never_asked = directly_trained(rows(50)), directly_trained(rows(50))
    for n in range(100):
        asked.probability({f"unknown {n}": 1.0, "hours": math.pi})
    assert json.dumps(asked.to_record()) == json.dumps(never_asked.to_record())
    assert len(pickle.dumps(asked)) == len(pickle.dumps(never_asked))  # nor takes memory


@pytest.mark.parametrize("module", [model, id_ranges], ids=["model", "id_ranges"])
def test_the_examples_in_the_documentation_are_true(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_contract_and_the_parsing_need_no_river_and_nothing_needs_dagster() -> None:
    script = """
import sys
sys.modules["river"] = None  # as if it were not installed
from outbox_pipelines.ml_service import training_pb2, training_pb2_grpc, server, model
model.parse_example('{"features": {"a": 1}, "label": true}')
assert "dagster" not in sys.modules
try:
    model.OnlineModel()
except ImportError as error:
    print(type(error).__name__, error)
"""
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert ran.stdout.startswith("MissingExtra")
    assert "pip install 'outbox-pipelines[ml-service]'" in ran.stdout
