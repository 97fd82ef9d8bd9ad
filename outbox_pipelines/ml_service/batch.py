"""Judging one batch: which rows are learned from, which never can be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outbox_pipelines.ml_service.model import BadExample, parse_example
from outbox_pipelines.ml_service.state import TenantState
from outbox_pipelines.ml_service.training_pb2 import Example


@dataclass(frozen=True)
class Judgement:
    """Every id of the batch, once, in the order of arrival."""

    #: Learned from, now or by an earlier delivery.
    accepted: tuple[int, ...]
    #: Reason by id of a row that can never be learned from.
    rejected: dict[int, str]
    #: How many of the accepted ones the model learned from just now.
    newly_learned: int


def learn_batch(state: TenantState, examples: Iterable[Example]) -> Judgement:
    """Learns from each good row unless its id is known, and judges all of them.

    An id that comes twice in a batch is judged once, by its first row: it names one outbox row.
    """
    accepted: dict[int, None] = {}
    rejected: dict[int, str] = {}
    newly_learned = 0
    for example in examples:
        if example.id in rejected or example.id in accepted:
            continue
        if example.id not in state.learned:
            try:
                parsed = parse_example(example.json)
            except BadExample as bad:
                # Not remembered: a row that was repaired and sent again is judged anew.
                rejected[example.id] = bad.reason
                continue
            state.model.learn(parsed)
            state.learned.add(example.id)
            newly_learned += 1
        accepted[example.id] = None
    return Judgement(tuple(accepted), rejected, newly_learned)
