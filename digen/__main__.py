"""`python -m digen`: the same as the `digen` command."""

from digen.cli import main

main()
