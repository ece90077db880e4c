"""Commands run as a user would, inside the test's process."""

import json

from typer.testing import CliRunner

from tokensworth.cli import app


def run_command(*words) -> dict:
    """What a command prints: its JSON, or its text; it must succeed."""
    result = CliRunner().invoke(app, [str(w) for w in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in words else {"text": result.stdout}
