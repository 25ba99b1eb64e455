"""The report page in a real browser, where one is installed: chromium or google-chrome."""

import base64
import html
import json
import re
import shutil
import subprocess

import pytest
from report_examples import made_up_longbench, made_up_records, write_results, write_run

from kvcat.report import write_report

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = (390, 768, 1280)
MEASURE = """
// words of which a part is on another line, as ranges of their letters have several rectangles
function brokenWords(page) {
  const broken = [];
  for (const cell of page.querySelectorAll("td, th, summary, .tile p, .verdict")) {
    const walker = page.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const text = walker.currentNode.data;
      for (const word of text.matchAll(/[^\\s-]+/g)) {
        const range = page.createRange();
        range.setStart(walker.currentNode, word.index);
        range.setEnd(walker.currentNode, word.index + word[0].length);
        if (range.getClientRects().length > 1) broken.push(word[0]);
      }
    }
  }
  return broken;
}
const shownRows = (table) => [...table.tBodies[0].rows].filter((row) => row.offsetHeight > 0);
const measures = {};
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument;
  const root = page.documentElement;
  page.querySelectorAll("details").forEach(element => element.open = true);
  const tables = [...page.querySelectorAll("table")];
  const values = (table, column) => [...table.tBodies[0].rows].map(
    row => Number(row.cells[column].dataset.value));
  const numeric = tables[0].tHead.rows[0].cells.length - 1;
  const folded = page.querySelector(".long");
  const rows = folded ? [shownRows(folded.querySelector("table")).length] : [];
  if (folded) {
    folded.querySelector("input").click();
    rows.push(shownRows(folded.querySelector("table")).length);
  }
  measures[frame.width] = {
    overflow: root.scrollWidth - root.clientWidth,
    without_alt: [...page.images].filter(image => !image.alt).length,
    broken_images: [...page.images].filter(image => !image.naturalWidth).length,
    dead_links: [...page.querySelectorAll('a[href^="#"]')]
      .map(link => link.getAttribute("href")).filter(name => !page.querySelector(name)),
    requests: [...page.querySelectorAll("[src], [href]")]
      .map(element => element.getAttribute("src") ?? element.getAttribute("href"))
      .filter(address => !/^(data:|#)/.test(address)),
    wide_tables: [...page.querySelectorAll(".scroll")]
      .filter(element => element.scrollWidth > element.clientWidth).length,
    broken_words: brokenWords(page),
    rows,
    num_tables: tables.length,
    downloads: [...page.querySelectorAll("a[download]")]
      .map(link => [link.download, link.getAttribute("href")]),
    background: page.defaultView.getComputedStyle(page.body).backgroundColor,
  };
  const button = tables[0].tHead.rows[0].cells[numeric].querySelector("button");
  button.click();
  measures[frame.width].ascending = values(tables[0], numeric);
  button.click();
  measures[frame.width].descending = values(tables[0], numeric);
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
        timeout=240,
    )
    (measures,) = re.findall(r'<pre id="measures">(.*?)</pre>', dumped.stdout, flags=re.DOTALL)
    return json.loads(html.unescape(measures))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page on several models, and a page on the methods of one model and on questions."""
    root = tmp_path_factory.mktemp("browser")
    methods = ("attention-matching", "gradient", "kvpress:ExpectedAttentionPress")
    records = made_up_records(("base", "control", "kvcat"), 6, methods)
    folder = write_results(root / "results", records, prefix_len=192, suffix_len=64)
    runs = {"control": write_run(root / "control", "control")}
    several = write_report([folder], root / "several", runs=runs, num_resamples=100)
    records = made_up_records(("base",), 6, (*methods, "snapkv", "tova"))
    alone = write_results(root / "alone", records, prefix_len=192, suffix_len=64)
    questions = write_results(root / "questions", made_up_longbench(), "longbench")
    answers = {"Is it small?": "Yes, 5 % of the slots suffice."}
    one = write_report([alone, questions], root / "one", answers=answers, num_resamples=100)
    return several, one


@pytest.mark.parametrize("which", [0, 1])
def test_nothing_is_wider_than_the_screen_or_broken_and_links_and_pictures_work(
    pages, which, tmp_path
):
    by_width = measured(pages[which], tmp_path)
    assert by_width["1280"]["wide_tables"] == 0
    for width, measures in by_width.items():
        assert measures["overflow"] <= 0, f"at {width} pixels"
        assert measures["broken_words"] == [], f"at {width} pixels"
        assert measures["without_alt"] == measures["broken_images"] == 0
        assert measures["dead_links"] == measures["requests"] == []


@pytest.mark.parametrize("which", [0, 1])
def test_tables_are_sorted_by_a_heading_folded_if_long_and_downloaded_as_csv(
    pages, which, tmp_path
):
    measures = measured(pages[which], tmp_path)["1280"]
    assert measures["ascending"] == sorted(measures["ascending"])
    assert measures["descending"] == measures["ascending"][::-1]
    assert len(set(measures["ascending"])) > 1
    assert measures["rows"] == [12, (18, 15)[which]]
    for name, address in measures["downloads"]:
        text = base64.b64decode(address.partition("base64,")[2]).decode()
        written = (pages[which].parent / "tables").glob(f"*{name}")
        assert text in [file.read_text(encoding="utf-8") for file in written]
    assert 0 < len(measures["downloads"]) <= measures["num_tables"]


def test_the_page_is_dark_where_the_reader_prefers_that(pages, tmp_path):
    light = measured(pages[0], tmp_path)["1280"]["background"]
    dark = measured(
        pages[0], tmp_path, "--force-dark-mode", "--blink-settings=preferredColorScheme=0"
    )
    assert light == "rgb(255, 255, 255)"
    assert dark["1280"]["background"] == "rgb(20, 23, 26)"
