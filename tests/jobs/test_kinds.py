"""Kinds: what cannot work is refused where it is written down, with the remedy."""

import dataclasses
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outbox_pipelines.jobs.context import JobContext
from outbox_pipelines.jobs.kinds import (
    Backoff,
    InvalidKind,
    JobKind,
    Kinds,
    UnknownKind,
    load_kinds,
)
from tests.jobs.messages import a_kind, do_nothing


async def a_coroutine(job: JobContext) -> None:
    """No handler."""


def a_generator(job: JobContext) -> Iterator[int]:
    """No handler either."""
    yield 1


async def an_async_generator(job: JobContext) -> AsyncIterator[int]:
    """Nor is this one."""
    yield 1


class CallableWithACoroutine:
    """A callable object whose call is a coroutine."""

    async def __call__(self, job: JobContext) -> None:
        """No handler."""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Write the module ``school_kinds`` into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in {"", str(tmp_path)}])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source: str) -> None:
        (tmp_path / "school_kinds.py").write_text(source)

    yield write
    for name in [name for name in sys.modules if name.startswith("school_kinds")]:
        del sys.modules[name]


def test_a_kind_has_the_defaults_that_the_documentation_names() -> None:
    kind = JobKind("timetable", do_nothing)
    assert (kind.consumers, kind.lease, kind.attempts, kind.timeout) == (2, 120, 5, 3600)
    assert (kind.backoff, kind.domain) == (Backoff(2, 300), None)


@pytest.mark.parametrize("name", ["a", "a1_b", "x" * 63, "sensor", "tenant"])
def test_a_name_of_lower_case_letters_digits_and_underscores_is_accepted(name: str) -> None:
    assert JobKind(name, do_nothing).name == name


@pytest.mark.parametrize(
    "name", ["", "A", "1a", "_a", "a-b", "a b", "a.b", "a\n", "ä", "x" * 64, "a/b", None, 7, b"a"], ids=repr
)
def test_any_other_name_is_refused_and_told_what_is_allowed(name: Any) -> None:
    with pytest.raises(InvalidKind, match=r"1 to 63 lower case letters, digits and underscores, and begins"):
        JobKind(name, do_nothing)


@pytest.mark.parametrize(
    "name", ["tenant_flush", "fleet_flush", "training_outbox", "job_recovery", "mail_sensor", "a_sensor"]
)
def test_a_name_that_dagster_would_have_twice_is_refused(name: str) -> None:
    with pytest.raises(InvalidKind, match=f"{name}.*choose another"):
        JobKind(name, do_nothing)


@pytest.mark.parametrize("handler", [None, "school.jobs:run", 7])
def test_a_handler_that_cannot_be_called_is_refused(handler: Any) -> None:
    with pytest.raises(InvalidKind, match="must be a function that takes a JobContext"):
        JobKind("mail", handler)


@pytest.mark.parametrize(
    "handler",
    [a_coroutine, a_generator, an_async_generator, partial(a_coroutine), CallableWithACoroutine()],
    ids=["coroutine", "generator", "async generator", "partial", "object"],
)
def test_a_handler_whose_call_would_run_nothing_is_refused(handler: Any) -> None:
    with pytest.raises(InvalidKind, match=r"asyncio\.run"):
        JobKind("mail", handler)


@pytest.mark.parametrize("handler", [do_nothing, partial(do_nothing), dict, lambda _job: None])
def test_anything_else_that_can_be_called_is_a_handler(handler: Any) -> None:
    assert JobKind("mail", handler).handler is handler


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"consumers": 0}, r"consumers=0; allowed are 1 to 16"),
        ({"consumers": 17}, r"consumers=17; allowed are 1 to 16"),
        ({"consumers": 1.5}, r"consumers=1\.5; allowed are 1 to 16"),
        ({"consumers": "2"}, r"consumers='2'; allowed are 1 to 16"),
        ({"consumers": True}, r"consumers=True; allowed are 1 to 16"),
        ({"lease": 9.9}, r"lease=9\.9; allowed are 10 s to a week"),
        ({"lease": 604_801}, r"lease=604801; allowed are 10 s to a week"),
        ({"lease": float("nan")}, r"lease=nan; allowed are 10 s to a week"),
        ({"lease": "60"}, r"lease='60'; allowed are 10 s to a week"),
        ({"attempts": 0}, r"attempts=0; allowed are 1 to 1,000"),
        ({"attempts": 1_001}, r"attempts=1001; allowed are 1 to 1,000"),
        ({"attempts": 2.0}, r"attempts=2\.0; allowed are 1 to 1,000"),
        ({"attempts": None}, r"attempts=None; allowed are 1 to 1,000"),
        ({"timeout": 0}, r"timeout=0; allowed are 0\.1 s to a week"),
        ({"timeout": float("inf")}, r"timeout=inf; allowed are 0\.1 s to a week"),
        ({"timeout": None}, r"timeout=None; allowed are 0\.1 s to a week"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value),
)
def test_a_number_out_of_bounds_is_refused_with_the_bounds(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidKind, match="job kind 'mail': " + told):
        JobKind("mail", do_nothing, **wrong)


@pytest.mark.parametrize(
    "right",
    [
        {"consumers": 1},
        {"consumers": 16},
        {"lease": 10},
        {"lease": 604_800},
        {"attempts": 1},
        {"attempts": 1_000},
        {"timeout": 0.1},
        {"timeout": 604_800},
    ],
    ids=repr,
)
def test_the_bounds_themselves_are_allowed(right: dict[str, Any]) -> None:
    JobKind("mail", do_nothing, **right)


@pytest.mark.parametrize(
    ("first", "maximum"), [(-1, 5), (6, 5), (1, 604_801), (float("nan"), 5), (1, float("nan")), ("2", 5)]
)
def test_a_backoff_that_cannot_be_is_refused(first: Any, maximum: float) -> None:
    with pytest.raises(InvalidKind, match=r"needed is 0 <= first <= maximum <= a week"):
        Backoff(first, maximum)


def test_a_backoff_doubles_up_to_its_maximum_less_a_quarter_at_most() -> None:
    backoff = Backoff(first=2, maximum=300)
    for failures, longest in [(1, 2), (2, 4), (5, 32), (9, 300), (1_000, 300)]:
        assert longest * 0.75 <= backoff.seconds(failures) <= longest
    assert Backoff(0, 0).seconds(3) == 0


def test_a_kind_cannot_be_changed_behind_the_check() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_kind().consumers = 99  # type: ignore[misc]


# The registered kinds


def test_kinds_are_found_by_name_in_their_order() -> None:
    kinds = Kinds([a_kind("b"), a_kind("a")])
    assert list(kinds) == ["b", "a"]
    assert len(kinds) == 2
    assert kinds["a"] is kinds.named("a")


def test_two_kinds_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidKind, match="'mail' is registered twice: give one of them another name"):
        Kinds([a_kind("mail"), a_kind("other"), a_kind("mail")])


def test_something_that_is_no_kind_is_refused() -> None:
    with pytest.raises(InvalidKind, match="must be JobKind objects, not function"):
        Kinds([do_nothing])  # type: ignore[list-item]


def test_an_unknown_kind_is_told_with_those_that_there_are() -> None:
    with pytest.raises(UnknownKind, match=r"no job kind 'c' is registered here \(registered: b, a\)"):
        Kinds([a_kind("b"), a_kind("a")]).named("c")
    with pytest.raises(UnknownKind, match=r"registered: none; name them with OUTBOX_KINDS=module:attribute"):
        Kinds().named("c")


# OUTBOX_KINDS


@pytest.mark.parametrize("place", [None, ""])
def test_no_setting_is_no_kinds(place: str | None) -> None:
    assert len(load_kinds(place)) == 0


@pytest.mark.parametrize(
    "made", ["[KIND]", "(KIND,)", "Kinds([KIND])", "{KIND.name: KIND}.values()", "(kind for kind in [KIND])"]
)
def test_kinds_are_loaded_from_the_current_folder_in_any_collection(module: Callable[[str], None], made: str) -> None:
    module(f"""
from outbox_pipelines.jobs.kinds import JobKind, Kinds
KIND = JobKind("mail", print)
KINDS = {made}
""")
    assert list(load_kinds("school_kinds:KINDS")) == ["mail"]


@pytest.mark.parametrize("place", ["school_kinds", "school_kinds:", ":KINDS", ":", "school_kinds.KINDS"])
def test_a_place_of_another_form_is_refused_with_an_example(place: str) -> None:
    with pytest.raises(InvalidKind, match=r"name it as module:attribute, school\.jobs:KINDS"):
        load_kinds(place)


def test_a_module_or_attribute_that_is_not_there_is_told(module: Callable[[str], None]) -> None:
    module("KINDS = []")
    with pytest.raises(InvalidKind, match="there is no module 'school_missing'; install it, or set PYTHONPATH"):
        load_kinds("school_missing:KINDS")
    with pytest.raises(InvalidKind, match=r"there is no module 'school_missing'"):
        load_kinds("school_missing.jobs:KINDS")
    with pytest.raises(InvalidKind, match="module 'school_kinds' has no 'MINE'"):
        load_kinds("school_kinds:MINE")


def test_an_import_that_the_module_itself_lacks_is_not_blamed_on_the_setting(module: Callable[[str], None]) -> None:
    module("import no_such_library")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_kinds("school_kinds:KINDS")


def test_a_library_whose_name_begins_the_modules_own_is_not_taken_for_it(module: Callable[[str], None]) -> None:
    module("import school")
    with pytest.raises(ModuleNotFoundError, match="'school'"):
        load_kinds("school_kinds:KINDS")


@pytest.mark.parametrize(
    ("made", "told"),
    [("KIND", "must be a list of JobKind objects, not JobKind"), ("print", "not builtin"), ("7", "not int")],
)
def test_an_attribute_that_holds_no_kinds_is_refused(module: Callable[[str], None], made: str, told: str) -> None:
    module(f"""
from outbox_pipelines.jobs.kinds import JobKind
KIND = JobKind("mail", print)
KINDS = {made}
""")
    with pytest.raises(InvalidKind, match=told):
        load_kinds("school_kinds:KINDS")


@pytest.mark.parametrize("made", ["'mail'", "[print]", "{'mail': KIND}"])
def test_a_collection_of_something_else_is_refused(module: Callable[[str], None], made: str) -> None:
    module(f"""
from outbox_pipelines.jobs.kinds import JobKind
KIND = JobKind("mail", print)
KINDS = {made}
""")
    with pytest.raises(InvalidKind, match="JobKind objects"):
        load_kinds("school_kinds:KINDS")
