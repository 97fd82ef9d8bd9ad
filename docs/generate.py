"""Write what is generated from the code, or check that it is up to date.

``python -m docs.generate`` writes the README's table of settings; with ``--check`` it
compares that table, and the committed gRPC code, with what would be written, and looks for
the tests that docs/guarantees.md names.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from outbox_pipelines.settings import Settings

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PROTO = Path("outbox_pipelines/ml_service/training.proto")
_TABLE = re.compile(r"(<!-- settings: begin[^>]*-->\n).*?(<!-- settings: end -->)", re.DOTALL)


def settings_table() -> str:
    """The settings as a Markdown table: variable, default, what is allowed, meaning."""
    lines = ["| Variable | Default | Allowed | Meaning |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = "" if field.default is None else f"`{getattr(field.default, 'value', field.default)}`".lower()
        lines.append(f"| `OUTBOX_{name.upper()}` | {default} | {_allowed(name)} | {field.description} |")
    return "\n".join(lines) + "\n"


def _allowed(name: str) -> str:
    schema = Settings.model_json_schema()
    field = schema["properties"][name]
    if "$ref" in field:
        values = schema["$defs"][field["$ref"].rpartition("/")[2]]["enum"]
        return ", ".join(f"`{value}`" for value in values)
    if "minimum" in field:
        return f"{field['minimum']:,} to {field['maximum']:,}"
    if field.get("type") == "boolean":
        return "`true`, `false`"
    return ""


def readme() -> str:
    """The README with its table as it should be."""
    return _TABLE.sub(lambda found: found.group(1) + settings_table() + found.group(2), README.read_text())


def stale_grpc_code() -> list[str]:
    """The generated gRPC modules that are not what training.proto gives."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, str(PROTO)], cwd=ROOT, check=True)
        made = sorted((Path(folder) / PROTO.parent).iterdir())
        return [file.name for file in made if file.read_text() != (ROOT / PROTO.parent / file.name).read_text()]


def missing_tests() -> list[str]:
    """Tests that docs/guarantees.md names and that are not there."""
    there = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "guarantees.md").read_text())
    return [name for name in named if f"def {name}(" not in there]


def main() -> int:
    """Write or check; 1 when something is out of date."""
    if "--check" not in sys.argv:
        README.write_text(readme())
        return 0
    stale = [] if README.read_text() == readme() else ["README.md (run: make docs)"]
    stale += [f"{name} (run: make proto)" for name in stale_grpc_code()]
    stale += [f"docs/guarantees.md (no test is called {name})" for name in missing_tests()]
    for name in stale:
        sys.stdout.write(f"out of date: {name}\n")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
