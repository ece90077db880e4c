"""`python -m tokensworth`."""

from tokensworth.cli import main

main()
