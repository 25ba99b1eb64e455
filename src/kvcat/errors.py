"""The one exception for a person's mistake."""


class InputError(ValueError):
    """A person's mistake, told in one line that names the offending value.

    Raised before any heavy work begins. The command line prints the line and exits with code 2; every other exception
    is a bug and shows its traceback.
    """
