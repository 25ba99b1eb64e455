"""The command line: parses, calls, prints."""

from kvcat.cli.app import main

__all__ = ["main"]
