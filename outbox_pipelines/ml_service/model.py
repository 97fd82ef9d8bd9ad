"""One tenant's online model, and what counts as an example it can learn from.

The same rows learned in the same order give the same model bit for bit, whichever way they came.
PostgreSQL's jsonb reorders keys and rewrites numbers (`1e2` becomes `100`, `-0.0` becomes `0.0`), and
a sum of floats depends on its order; so features are put in one canonical form before they reach
river: sorted by name, every value a float, no negative zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from river.linear_model import LogisticRegression
    from river.preprocessing import StandardScaler

#: Feature values are bounded so that no sequence of examples can overflow the running variance (it
#: holds squares) and turn the model into NaN for good.
MAX_MAGNITUDE = 1e100

#: Feature names in reasons are cut after this many characters.
_SHOWN_NAME_CHARS = 60

INSTALL_HINT = "pip install 'outbox-pipelines[ml-service]'"


class BadExample(ValueError):
    """Can never be learned from. `reason` is for people and holds no value of the payload."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class MissingExtra(ImportError):
    """A library of the optional extra `ml-service` is not installed."""

    def __init__(self, library: str) -> None:
        super().__init__(f"the reference ML service needs {library}: {INSTALL_HINT}", name=library)


@dataclass(frozen=True)
class ParsedExample:
    """One example that can be learned from."""

    #: Value by feature name; booleans are 1.0 and 0.0.
    features: Mapping[str, float]
    #: What happened: the outcome whose probability the model learns.
    label: bool


class ScalerRecord(TypedDict):
    """What the scaler knows of one feature."""

    count: int
    mean: float
    variance: float


class ModelRecord(TypedDict):
    """A model as plain JSON values. The order of the keys is part of it."""

    examples_seen: int
    intercept: float
    weights: dict[str, float]
    scaler: dict[str, ScalerRecord]


class OnlineModel:
    """Logistic regression on standardized features, learned one example at a time.

    Not safe for concurrent use: learn and predict under one lock.

    >>> model = OnlineModel()
    >>> model.learn(parse_example('{"features": {"hours": 3.5, "repeats": false}, "label": true}'))
    >>> model.examples_seen
    1
    >>> 0.0 <= model.probability({"hours": 2.0}) <= 1.0
    True

    Raises `MissingExtra` where river is not installed.
    """

    def __init__(self) -> None:
        self._scaler, self._regression = _river_steps()
        self._pipeline = self._scaler | self._regression
        self._examples_seen = 0

    @property
    def examples_seen(self) -> int:
        """How many examples the model has learned from."""
        return self._examples_seen

    def learn(self, example: ParsedExample) -> None:
        """Learns from one example. Features may come and go from one example to the next."""
        self._pipeline.learn_one(_canonical(example.features), example.label)
        self._examples_seen += 1

    def probability(self, features: Mapping[str, float]) -> float:
        """P(label is true). Learns nothing; an untrained model answers 0.5."""
        # river's scaler would make an entry for every name it is asked about. A feature that was
        # never learned has no weight, so leaving it out changes no answer.
        known = {name: value for name, value in features.items() if name in self._scaler.counts}
        return float(self._pipeline.predict_proba_one(_canonical(known))[True])

    def to_record(self) -> ModelRecord:
        """The whole model as JSON values; floats survive JSON exactly."""
        scaler = self._scaler
        return ModelRecord(
            examples_seen=self._examples_seen,
            intercept=float(self._regression.intercept),
            weights=dict(self._regression.weights),
            scaler={
                name: ScalerRecord(count=count, mean=scaler.means[name], variance=scaler.vars[name])
                for name, count in scaler.counts.items()
            },
        )

    @classmethod
    def from_record(cls, record: ModelRecord) -> OnlineModel:
        """The model that `to_record` described: it answers and learns on bit for bit the same.

        Raises KeyError, TypeError or ValueError for a record that is none.
        """
        model = cls()
        from river.utils import VectorDict

        model._examples_seen = int(record["examples_seen"])
        regression = model._regression
        regression.intercept = float(record["intercept"])
        regression.optimizer.n_iterations = model._examples_seen
        # river has no public way in. The order of the weights is kept: a dot product sums in it.
        regression._weights = VectorDict({name: float(w) for name, w in record["weights"].items()})
        for name, seen in record["scaler"].items():
            model._scaler.counts[name] = int(seen["count"])
            model._scaler.means[name] = float(seen["mean"])
            model._scaler.vars[name] = float(seen["variance"])
        return model


def parse_example(json_text: str) -> ParsedExample:
    """Reads `{"features": {name: number or boolean}, "label": boolean}`; other keys are ignored.

    The label may also be 0 or 1. Raises `BadExample` for anything that can never be learned from.
    """
    example = _object(json_text)
    if "features" not in example:
        raise BadExample("has no features")
    features = _features(example["features"])
    if "label" not in example:
        raise BadExample("has no label")
    label = example["label"]
    if not isinstance(label, bool | float) or label not in (0, 1):
        raise BadExample("label is none of true, false, 1 and 0")
    return ParsedExample(features=features, label=bool(label))


def parse_features(json_text: str) -> Mapping[str, float]:
    """Reads `{name: number or boolean}`. Raises `BadExample` where `parse_example` would."""
    return _features(_object(json_text))


def _object(json_text: str) -> dict[str, object]:
    try:
        # Integers become floats here: Python refuses to read very long ones, and all are floats later.
        value = json.loads(json_text, parse_int=float)
    except json.JSONDecodeError as error:
        # Only the position: the decoder's own text may quote the payload.
        raise BadExample(f"is not valid JSON (at character {error.pos})") from None
    except RecursionError:
        raise BadExample("is nested too deeply") from None
    if not isinstance(value, dict):
        raise BadExample("is not a JSON object")
    return value


def _features(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise BadExample("features are not a JSON object")
    if not value:
        raise BadExample("features are empty")
    for name, number in value.items():
        if not isinstance(number, bool | float):
            raise BadExample(f"feature {_shown(name)} is neither a number nor a boolean")
        if not abs(number) <= MAX_MAGNITUDE:  # also true of NaN
            raise BadExample(f"feature {_shown(name)} is not a finite number of at most {MAX_MAGNITUDE:g}")
    return _canonical(value)


def _canonical(features: Mapping[str, float]) -> dict[str, float]:
    # Adding 0.0 turns -0.0, which PostgreSQL does not keep, into 0.0.
    return {name: float(features[name]) + 0.0 for name in sorted(features)}


def _shown(name: str) -> str:
    # repr() escapes what protobuf and PostgreSQL cannot carry: lone surrogates, NUL.
    return repr(name if len(name) <= _SHOWN_NAME_CHARS else f"{name[:_SHOWN_NAME_CHARS]}…")


def _river_steps() -> tuple[StandardScaler, LogisticRegression]:
    # Imported late: the contract and the parsing must work without river, and it takes a second.
    try:
        from river.linear_model import LogisticRegression
        from river.preprocessing import StandardScaler
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "river") from error
    return StandardScaler(), LogisticRegression()
