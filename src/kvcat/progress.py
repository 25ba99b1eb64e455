"""Progress bars: whether the environment hides them."""

import os


def disable_bar(otherwise: bool | None = None) -> bool | None:
    """Value of tqdm's argument ``disable``: True if TQDM_DISABLE=1 is set, else ``otherwise``.

    tqdm looks at the variable only where ``disable`` is not passed.

    Args:
        otherwise: True hides the bar, None hides it unless it is on a terminal.
    """
    return True if os.environ.get("TQDM_DISABLE", "") not in ("", "0") else otherwise
