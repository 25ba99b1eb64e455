"""The page in a headless browser: on a phone, cut off from the network."""

import re
import shutil
import subprocess

import pytest
from report_examples import made_up_longbench, made_up_needle, made_up_qa, made_up_records, write_results

from kvcat.report import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
)  # fmt: skip
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")

# the frame's page tells the outer one its widths, what sticks out and what it requested
PROBE = """<script>addEventListener('load', () => {
  const wide = [...document.querySelectorAll('section > *, .scroll, figure, .tile, .alarm')]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 60));
  const loaded = performance.getEntriesByType('resource').map(r => r.name).filter(n => !n.startsWith('data:'));
  const tables = [...document.querySelectorAll('table')].filter(t => t.getBoundingClientRect().width > 0);
  const narrow = tables.filter(t => t.rows[1].cells[0].getBoundingClientRect().width > innerWidth / 2).length;
  parent.postMessage('probe ' + JSON.stringify([document.documentElement.scrollWidth, wide, loaded, narrow]), '*');
});</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    folders = [
        write_results(root / "suffix", made_up_records(("base", "kvcat"), 3, ("snapkv",))),
        write_results(root / "needle", made_up_needle(per_depth=3), "needle", length=1024),
        write_results(root / "longbench", made_up_longbench(skill=0.25), "longbench"),
        write_results(root / "qa", made_up_qa(("base", "kvcat"), 5), "qa"),
    ]
    return write_report(folders, root / "out", title="All", paper_model="Qwen2.5-0.5B")


def browse(page, tmp_path, *options):
    command = [str(BROWSER), *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def probed(text, tmp_path):
    """What the page tells in a frame of a phone's width; a window cannot be made as narrow."""
    inner, outer = tmp_path / "inner.html", tmp_path / "outer.html"
    inner.write_text(text.replace("</head>", f"{PROBE}</head>"))
    outer.write_text(
        f"<iframe src='{inner.as_uri()}' width=390 height=800 style='border:0'></iframe>"
        "<script>addEventListener('message', e => document.title = e.data)</script>"
    )
    dumped = browse(outer, tmp_path, "--dump-dom", "--virtual-time-budget=5000")
    found = re.search(r"<title>probe (.*?)</title>", dumped)
    assert found, dumped[:500]
    return found[1]


def test_nothing_sticks_out_on_a_phone_labels_leave_room_and_nothing_is_requested(page, tmp_path):
    text = page.read_text()
    assert probed(text, tmp_path) == "[390,[],[],0]"
    broken = text.replace("<main>", '<main><p style="width:600px">wide</p>', 1)
    assert not probed(broken, tmp_path).startswith("[390")
