"""The report page in a real browser, where one is installed: chromium or google-chrome."""

import html
import json
import re
import shutil
import subprocess

import pytest
from report_examples import made_up_records, write_results, write_run

from kvcat.report import write_report

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = (390, 768, 1280)
MEASURE = """
const measures = {};
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument;
  const root = page.documentElement;
  page.querySelectorAll("details").forEach(element => element.open = true);
  measures[frame.width] = {
    overflow: root.scrollWidth - root.clientWidth,
    without_alt: [...page.images].filter(image => !image.alt).length,
    broken_images: [...page.images].filter(image => !image.naturalWidth).length,
    dead_links: [...page.querySelectorAll('a[href^="#"]')]
      .map(link => link.getAttribute("href")).filter(name => !page.querySelector(name)),
    wide_tables: [...page.querySelectorAll(".scroll")]
      .filter(element => element.scrollWidth > element.clientWidth).length,
    background: page.defaultView.getComputedStyle(page.body).backgroundColor,
  };
}
document.getElementById("measures").textContent = JSON.stringify(measures);
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome here"),
]


def measured(page, folder, *options):
    """What the browser measures of a page at several widths, all folds open."""
    text = html.escape(page.read_text(encoding="utf-8"), quote=True)
    frames = [f'<iframe width="{width}" height="900" srcdoc="{text}"></iframe>' for width in WIDTHS]
    script = f"window.onload = () => {{ {MEASURE} }};"
    wrapper = folder / "wrapper.html"
    wrapper.write_text(
        f'<!doctype html><meta charset="utf-8"><pre id="measures"></pre>{"".join(frames)}'
        f"<script>{script}</script>",
        encoding="utf-8",
    )
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000", *options]
    dumped = subprocess.run(
        [*command, "--dump-dom", wrapper.as_uri()],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    (measures,) = re.findall(r'<pre id="measures">(.*?)</pre>', dumped.stdout, flags=re.DOTALL)
    return json.loads(html.unescape(measures))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("browser")
    records = made_up_records(("base", "control", "kvcat"), 6, ("attention-matching", "gradient"))
    folder = write_results(root / "results", records, prefix_len=192, suffix_len=64)
    runs = {"control": write_run(root / "control", "control")}
    return write_report([folder], root / "out", runs=runs, num_resamples=100)


def test_nothing_is_wider_than_the_screen_and_links_and_pictures_work(page, tmp_path):
    by_width = measured(page, tmp_path)
    assert by_width["1280"]["wide_tables"] == 0
    for width, measures in by_width.items():
        assert measures["overflow"] <= 0, f"at {width} pixels"
        assert measures["without_alt"] == measures["broken_images"] == 0
        assert measures["dead_links"] == []


def test_the_page_is_dark_where_the_reader_prefers_that(page, tmp_path):
    light = measured(page, tmp_path)["1280"]["background"]
    dark = measured(page, tmp_path, "--force-dark-mode", "--blink-settings=preferredColorScheme=0")
    assert light == "rgb(255, 255, 255)"
    assert dark["1280"]["background"] == "rgb(20, 23, 26)"
