"""Short runs for the tests of the trainer."""

import pytest

from training_runs import config


@pytest.fixture
def new_run(tiny_folder, texts_folder, tmp_path):
    """The configuration of a short run whose folder has this name."""
    return lambda name="run", **options: config(
        tiny_folder, texts_folder, tmp_path / name, **options
    )
