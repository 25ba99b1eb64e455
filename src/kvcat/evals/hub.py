"""Rows of data sets on the Hugging Face Hub, or a line that says why there are none."""

from collections.abc import Iterator
from typing import Any

import datasets
from datasets.exceptions import DatasetsError
from huggingface_hub import constants

from kvcat.errors import InputError, one_line
from kvcat.network import hub_obstacle


def hub_rows(repository: str, config: str | None, split: str) -> Iterator[Any]:
    """Rows of a data set, from the cache alone where HF_HUB_OFFLINE is set.

    Args:
        repository: OWNER/NAME.
        config: name of the configuration; None takes the default.
        split: such as ``validation``.

    Raises:
        InputError: the Hub cannot be reached (told within seconds), or has no such data set.
    """
    # with HF_HUB_OFFLINE datasets itself looks into its cache, at once
    if not constants.HF_HUB_OFFLINE and (obstacle := hub_obstacle()):
        raise InputError(
            f"data set {repository!r} is on the Hub, and {obstacle}: name a local copy, or set HF_HUB_OFFLINE=1 to "
            "take the one an earlier run left in the cache"
        )
    try:
        yield from datasets.load_dataset(repository, config, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        raise InputError(f"data set {repository!r} cannot be opened: {one_line(error)}") from None
