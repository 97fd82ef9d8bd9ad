"""Identifiers in SQL: the one way that a schema's name gets into a statement."""

from outbox_pipelines.errors import OutboxError

MAX_IDENTIFIER_BYTES = 63
"""PostgreSQL cuts longer names silently (NAMEDATALEN - 1), which would join two tenants' schemas."""


class InvalidSchemaName(OutboxError):
    """A schema of that name cannot exist, or must not be used for a tenant."""


def quote_identifier(name: str) -> str:
    """The name as a quoted SQL identifier, for example ``"tenant_x""y"``."""
    return '"' + name.replace('"', '""') + '"'


def driver_identifier(name: str) -> str:
    """A quoted identifier for ``Connection.exec_driver_sql``.

    The driver takes ``%`` as the start of a parameter, in identifiers too, so it is doubled.
    (``text()`` would trip over a colon instead, which is why tenant SQL does not use it.)
    """
    return quote_identifier(name).replace("%", "%%")


def check_schema_name(name: str) -> str:
    """The name itself, when a tenant's schema may be called so.

    Raises:
        InvalidSchemaName: saying what is wrong and what is allowed.
    """
    size = len(name.encode("utf-8", errors="surrogatepass"))
    if not name:
        problem = "is empty"
    elif "\x00" in name or any(0xD800 <= ord(char) <= 0xDFFF for char in name):
        problem = "holds a character that PostgreSQL cannot store"
    elif size > MAX_IDENTIFIER_BYTES:
        problem = f"is {size} bytes long"
    elif name.startswith("pg_") or name in {"information_schema", "outbox"}:
        problem = "is reserved"
    else:
        return name
    raise InvalidSchemaName(
        f"a tenant's schema cannot be called {name!r}: it {problem}. Allowed are 1 to "
        f"{MAX_IDENTIFIER_BYTES} bytes of UTF-8 that do not begin with 'pg_' and are not "
        "'information_schema' or 'outbox'"
    )
