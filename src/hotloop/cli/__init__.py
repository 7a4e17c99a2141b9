"""The `hotloop` command: one thin module per verb."""

from hotloop.cli.command import main

__all__ = ["main"]
