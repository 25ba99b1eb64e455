"""The command line: it parses arguments, calls the library and prints."""

from kvcat.cli.app import main as main
