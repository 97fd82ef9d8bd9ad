"""Rows to learn from, and the model that learning them directly gives."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence

from outbox_pipelines.ml_service.model import OnlineModel, parse_example
from outbox_pipelines.ml_service.training_pb2 import Example

TENANT = "7d3c1a52-9f0e-4a61-8c77-0b2f5f1e6a01"
OTHER_TENANT = "7d3c1a52-9f0e-4a61-8c77-0b2f5f1e6a02"

#: What predictions are compared on: known and unknown features, booleans, far-off values.
QUESTIONS = (
    '{"hours": 3.25, "score": 17, "repeats": true}',
    '{"score": -1e9, "hours": 0}',
    '{"never seen": 5, "absences": 0.1}',
)


def rows(count: int, *, seed: int = 1, first_id: int = 1) -> list[Example]:
    """Rows with ids from `first_id` on; features differ from row to row."""
    chance = random.Random(seed)
    made = []
    for id_ in range(first_id, first_id + count):
        features: dict[str, float | bool] = {
            "hours": chance.uniform(0, 10),
            "score": chance.randint(-50, 50),
            "repeats": chance.random() < 0.3,
            "absences": chance.gauss(0, 1e6),
        }
        for name in chance.sample(sorted(features), chance.randint(0, 3)):
            del features[name]
        label = chance.random() < 0.5
        made.append(Example(id=id_, json=json.dumps({"features": features, "label": label})))
    return made


def batches(examples: Sequence[Example], size: int = 10) -> list[Sequence[Example]]:
    return [examples[at : at + size] for at in range(0, len(examples), size)]


def directly_trained(examples: Iterable[Example]) -> OnlineModel:
    """The model that learned these rows in this process, without a service."""
    model = OnlineModel()
    for example in examples:
        model.learn(parse_example(example.json))
    return model


def answers(model: OnlineModel) -> list[float]:
    """The model's probabilities for QUESTIONS."""
    return [model.probability(json.loads(question)) for question in QUESTIONS]
