"""The text of any error can be stored, and shows when it was cut."""

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from outbox_pipelines.database.error_text import MAX_ERROR_LENGTH, error_text

CUT = " … (cut)"
any_text = st.text(st.characters(exclude_categories=()))
"""Every code point, NUL and the surrogates among them."""

long_text = st.builds(
    lambda part, times, end: part * times + end,
    st.text(st.characters(exclude_categories=()), min_size=1, max_size=5),
    st.integers(390, 2010),
    any_text,
)
"""Around and above the limit."""

emoji = "\N{GRINNING FACE}"


def storable(char: str) -> bool:
    """Whether PostgreSQL and UTF-8 have the character."""
    return char != "\x00" and not "\ud800" <= char <= "\udfff"


def stored(engine: Engine, value: str) -> tuple[str, int]:
    """The text as a text column gives it back, and its length there."""
    with engine.connect() as connection:
        return tuple(
            connection.execute(
                text("""
                    INSERT INTO outbox.ml_service_health (target, reachable, detail) VALUES ('x', true, :value)
                    RETURNING detail, length(detail)
                """),
                {"value": value},
            ).one()
        )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(any_text | long_text)
@example(emoji * 2000)
@example(emoji * 2001)
@example("a" + emoji * 2000)
@example("\x00" * 3000)
@example("\ud83d" * 2001)
def test_any_text_can_be_stored_within_the_limit(engine: Engine, value: str) -> None:
    told = error_text(value)
    assert stored(engine, told) == (told, len(told))
    assert len(told) <= MAX_ERROR_LENGTH


@given(any_text | long_text, st.integers(0, 40) | st.just(MAX_ERROR_LENGTH))
def test_a_text_that_fits_keeps_every_good_character_and_one_that_does_not_is_visibly_cut(
    value: str, limit: int
) -> None:
    told = error_text(value, limit=limit)
    assert len(told) <= limit
    if len(value) <= limit:
        kept = value
    else:
        assert len(told) == limit
        assert told.endswith(CUT[:limit])
        kept = value[: max(limit - len(CUT), 0)]
    assert all(shown == (char if storable(char) else "\ufffd") for shown, char in zip(told, kept, strict=False))


@given(st.text(max_size=MAX_ERROR_LENGTH).filter(lambda value: "\x00" not in value))
def test_a_clean_text_that_fits_is_unchanged(value: str) -> None:
    assert error_text(value) == value


def test_four_byte_characters_around_the_limit() -> None:
    assert error_text(emoji * 1999) == emoji * 1999
    assert error_text(emoji * 2000) == emoji * 2000
    cut = error_text(emoji * 2001)
    assert cut == emoji * (2000 - len(CUT)) + CUT


def test_nul_and_lone_surrogates_are_replaced_and_the_rest_stays() -> None:
    assert error_text("a\x00b\ud800c\udfffd") == "a\ufffdb\ufffdc\ufffdd"


def test_an_error_is_told_by_its_text_or_else_by_its_type() -> None:
    assert error_text(ValueError("no good")) == "no good"
    assert error_text(ValueError()) == "ValueError"
    assert error_text(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_an_error_whose_text_cannot_be_read_is_still_told() -> None:
    class RaisesError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not even this")

    class NoStringError(Exception):
        def __str__(self) -> str:
            return 5  # type: ignore[return-value]

    class EndlessError(Exception):
        def __str__(self) -> str:
            return str(self)

    for kind in (RaisesError, NoStringError, EndlessError):
        assert error_text(kind()) == f"{kind.__name__} (its text cannot be read)"


def test_an_errors_text_is_cut_too() -> None:
    told = error_text(ValueError("x\x00" * 5000))
    assert len(told) == MAX_ERROR_LENGTH
    assert told.endswith(CUT)
    assert "\x00" not in told
