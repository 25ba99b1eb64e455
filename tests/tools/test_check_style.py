"""The check of the sources reports what it should, and nothing else."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tools"))

from check_style import Findings, check_words


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("A cache of 20 % of the slots, 12.5 % of the bytes.", ""),
        ("A cache of 20% of the slots.", "0%"),
        ("A cache of {share:g}% of the slots.", "}%"),
        ("A cache of {share:.1%} of the slots.", ":.1%}"),
        ("The bar is {percentage:3.0f}%|{bar}|", ""),
        ("A link to https://example.org/a%20b and %5.1f", ""),
    ],
)
def test_a_percent_sign_without_a_space_is_reported(tmp_path, text, wrong):
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    findings = Findings()
    check_words(page, findings)
    assert [line.split(": ")[1] for line in findings.lines] == ([repr(wrong)] if wrong else [])
