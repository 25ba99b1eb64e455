"""The command line's message on a user's mistake."""

import pytest

from kvcat.cli.app import run


@pytest.fixture
def mistake(capsys):
    """The one line on standard error of a command that ends with exit code 2."""

    def message_of(*argv):
        capsys.readouterr()
        code = run([str(x) for x in argv])
        said = capsys.readouterr()
        assert (code, said.out, len(said.err.splitlines())) == (2, "", 1), said
        assert said.err.startswith("kvcat: ")
        return said.err

    return message_of
