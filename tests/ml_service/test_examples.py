from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_pipelines.ml_service.model import BadExample, parse_example, parse_features

BAD = {
    "empty text": ("", "not valid JSON"),
    "not JSON": ('{"features": {"a": 1}, "label": tru', "not valid JSON"),
    "two documents": ('{"features": {"a": 1}, "label": true} {}', "not valid JSON"),
    "nested without end": ("[" * 200_000, "nested too deeply"),
    "a list": ("[1, 2]", "not a JSON object"),
    "null": ("null", "not a JSON object"),
    "no features": ('{"label": true}', "has no features"),
    "features a list": ('{"features": [1], "label": true}', "features are not a JSON object"),
    "features null": ('{"features": null, "label": true}', "features are not a JSON object"),
    "features empty": ('{"features": {}, "label": true}', "features are empty"),
    "a text feature": ('{"features": {"age": "41"}, "label": true}', "'age' is neither a number"),
    "a null feature": ('{"features": {"age": null}, "label": true}', "'age' is neither a number"),
    "a nested feature": ('{"features": {"age": {"x": 1}}, "label": true}', "'age' is neither a number"),
    "NaN": ('{"features": {"age": NaN}, "label": true}', "'age' is not a finite number"),
    "infinity": ('{"features": {"age": -Infinity}, "label": true}', "'age' is not a finite number"),
    "beyond floats": ('{"features": {"age": 1e999}, "label": true}', "'age' is not a finite number"),
    "huge": ('{"features": {"age": -1.1e100}, "label": true}', "'age' is not a finite number"),
    "very many digits": (
        f'{{"features": {{"age": {"9" * 5000}}}, "label": true}}',
        "'age' is not a finite number",
    ),
    "no label": ('{"features": {"age": 41}}', "has no label"),
    "label null": ('{"features": {"age": 41}, "label": null}', "label is none of"),
    "label a text": ('{"features": {"age": 41}, "label": "true"}', "label is none of"),
    "label a list": ('{"features": {"age": 41}, "label": []}', "label is none of"),
    "label 2": ('{"features": {"age": 41}, "label": 2}', "label is none of"),
    "label NaN": ('{"features": {"age": 41}, "label": NaN}', "label is none of"),
}


def reason_against(text: str) -> str:
    """Why the example is bad; empty when it is good."""
    try:
        parse_example(text)
    except BadExample as bad:
        return bad.reason
    return ""


@pytest.mark.parametrize(("text", "reason"), BAD.values(), ids=BAD.keys())
def test_what_can_never_be_learned_from_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(BadExample, match=reason):
        parse_example(text)


@pytest.mark.parametrize(
    ("label", "meaning"), [("true", True), ("1", True), ("1.0", True), ("false", False), ("0", False)]
)
def test_a_label_may_be_a_boolean_or_0_or_1(label: str, meaning: bool) -> None:
    assert parse_example(f'{{"features": {{"a": 1}}, "label": {label}}}').label is meaning


def test_other_keys_of_an_example_are_ignored() -> None:
    example = parse_example('{"note": "x", "features": {"a": 2, "b": true}, "label": false}')
    assert dict(example.features) == {"a": 2.0, "b": 1.0}


def test_numbers_as_postgresql_rewrites_them_are_the_same_numbers() -> None:
    written = '{"d": 1e2, "c": -0.0, "b": 12345678901234567890, "a": 1.50}'
    kept = '{"a": 1.50, "b": 12345678901234567890, "c": 0.0, "d": 100}'
    first, second = parse_features(written), parse_features(kept)
    assert [(k, v.hex()) for k, v in first.items()] == [(k, v.hex()) for k, v in second.items()]


SECRET = "s3cr3t"


@given(
    st.recursive(
        st.sampled_from([SECRET, None, True, 1e300, float("nan")]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["features", "label", "a"]), inner),
        max_leaves=8,
    )
)
def test_a_reason_shows_no_value_of_the_payload(payload: object) -> None:
    reason = reason_against(json.dumps(payload))
    assert SECRET not in reason
    assert "e+300" not in reason


@pytest.mark.parametrize("name", ["x" * 10_000, "\ud800", "a\x00b", "\x1b[2J"])
def test_a_reason_can_be_stored_and_shown_whatever_the_feature_is_called(name: str) -> None:
    with pytest.raises(BadExample) as bad:
        parse_example(json.dumps({"features": {name: "text"}, "label": True}))
    assert len(bad.value.reason) < 200
    assert bad.value.reason.encode("utf-8")
    assert bad.value.reason.isprintable()
