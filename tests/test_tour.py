"""The method written out in examples/tour.py gives the numbers of the product."""

import runpy
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[1] / "examples" / "tour.py"


@pytest.mark.slow
def test_the_tour_computes_what_attention_matching_computes(capsys):
    runpy.run_path(str(TOUR), run_name="__main__")  # its assertions are the test
    printed = capsys.readouterr().out
    assert "paper: keys 0.0e+00" in printed
    assert "kvcat: keys 0.0e+00" in printed


def test_the_tour_is_read_in_one_sitting():
    assert len(TOUR.read_text(encoding="utf-8").splitlines()) <= 300
