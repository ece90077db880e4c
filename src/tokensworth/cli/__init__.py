"""The command line, thin: options in, a job run, a table or JSON out. Heavy imports wait for their command."""

import sys

import typer

from tokensworth.allocator import keep_freed_memory
from tokensworth.cli import comparing, deciding, deploying, depth, reporting, running, tokens, training, tuning
from tokensworth.errors import TokensworthError

app = typer.Typer(
    name="tokensworth",
    help="Adaptive inference for vision transformers: spend on each image only the tokens it is worth.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=False,
)
for group in (tuning, training, deciding, running, tokens, comparing, depth, reporting, deploying):
    group.add_to(app)


def main() -> None:
    """Entry point: freed memory is kept, our own errors become one line and exit code 1."""
    keep_freed_memory()
    try:
        app()
    except TokensworthError as error:
        line = " ".join(str(error).split())
        print(f"tokensworth: {line}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("tokensworth: stopped; run the same command again to go on", file=sys.stderr)
        sys.exit(130)
