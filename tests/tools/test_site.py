"""The documentation site's hooks: no line of a page ends inside a figure."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs")
FILE = Path(__file__).parent.parent.parent / "tools" / "site.py"
SPEC = importlib.util.spec_from_file_location("kvcat_site", FILE)
site = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(site)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("KL at 5 % of the slots", "KL at 5_% of the slots"),
        ("| **.851** [.818, .895] p < .001 |", "| **.851** [.818,_.895] p_<_.001 |"),
        ("+.0179 [-.0061, +.0298] p .007", "+.0179 [-.0061,_+.0298] p_.007"),
        ("of 1, 2 and 5 slots [a, b]", "of 1, 2 and 5 slots [a, b]"),
        ("```\n5 % [.8, .9]\n```", "```\n5 % [.8, .9]\n```"),
    ],
)
def test_figures_of_a_page_are_not_broken_but_code_stays_as_it_is(text, shown):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="results.md"))
    changed = site.on_page_markdown(text, page=page, config=None, files=None)
    assert changed == shown.replace("_", "\u00a0")


def test_a_line_may_end_in_long_code_alone():
    html = "<p><code>--keep 0.2</code> <code>python benchmarks/leaderboard.py</code></p>"
    shown = site.on_page_content(html, page=None)
    assert shown == html.replace("<code>--keep", '<code class="short">--keep')
