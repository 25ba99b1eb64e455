"""The page in a headless browser: on a phone, in print, and cut off from the network."""

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
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")

# what the probe finds stands in the title of the page it dumps
PROBE = """<script>addEventListener('load', () => {
  const wide = [...document.querySelectorAll('main > *, .scroll, figure, .verdict, .alarm')]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 60));
  const loaded = performance.getEntriesByType('resource').map(r => r.name).filter(n => !n.startsWith('data:'));
  document.title = 'probe ' + JSON.stringify([document.documentElement.scrollWidth, innerWidth, wide, loaded]);
});</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    folders = [
        write_results(root / "suffix", made_up_records(("base", "kvcat"), 3, ("random",))),
        write_results(root / "needle", made_up_needle(("base", "kvcat"), 3, (0.1, 0.5)), "needle", length=1024),
        write_results(root / "longbench", made_up_longbench(skill=0.25), "longbench"),
        write_results(root / "qa", made_up_qa(("base", "kvcat"), 5), "qa"),
    ]
    return write_report(folders, root / "out", title="All", paper_model="Qwen2.5-0.5B")


def browse(page, tmp_path, *options):
    command = [str(BROWSER), *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def probed(page, tmp_path, width):
    """Scroll width, width, elements that stick out and what was requested, in a frame of a phone's width."""
    inner = tmp_path / "inner.html"
    inner.write_text(page.read_text().replace("</head>", f"{PROBE}</head>"))
    outer = tmp_path / "outer.html"  # a window cannot be made as narrow as a frame
    outer.write_text(
        f"<iframe src='{inner.as_uri()}' width={width} height=800 style='border:0'></iframe>"
        "<script>addEventListener('message', e => document.title = e.data)</script>"
    )
    inner.write_text(inner.read_text().replace("document.title = ", "parent.postMessage(").replace(
        "wide, loaded]);\n", "wide, loaded]), '*');\n"
    ))  # fmt: skip
    dumped = browse(outer, tmp_path, "--dump-dom", "--virtual-time-budget=5000")
    found = re.search(r"<title>probe (.*?)</title>", dumped)
    assert found, dumped[:500]
    return found[1]


@needs_browser
def test_nothing_sticks_out_on_a_phone_and_nothing_is_requested(page, tmp_path):
    assert probed(page, tmp_path, 390) == "[390,390,[],[]]"


@needs_browser
def test_the_probe_sees_what_sticks_out(page, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("<main>", '<main><p style="width:600px">wide</p>', 1))
    assert not probed(broken, tmp_path, 390).startswith("[390,390")


@needs_browser
def test_print_shows_every_section_and_what_is_folded_on_the_screen(page, tmp_path):
    """In print what is folded is laid out: a browser told to print makes a longer document with it than without."""
    target, without = tmp_path / "page.pdf", tmp_path / "without.pdf"
    browse(page, tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={target}")
    bare = tmp_path / "bare.html"
    bare.write_text(re.sub(r"</summary>.*?</details>", "</summary></details>", page.read_text(), flags=re.S))
    browse(bare, tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={without}")
    count = [len(re.findall(rb"/Type\s*/Page\b", file.read_bytes())) for file in (target, without)]
    assert count[0] > count[1] > 0


def test_models_that_cannot_do_a_task_get_an_alarm_and_no_verdict(page):
    text = page.read_text()
    section = text[text.index("LongBench v2 (longbench)</h2>") : text.index("Questions without compression (qa)</h2>")]
    assert section.count("PLUMBING, NOT A RESULT") == 2
    assert "no result, a check that everything runs" in section
    assert section.index("PLUMBING, NOT A RESULT") < section.index("<h3>Verdict")
    assert "not above chance, 25%" in section


def test_each_evaluation_is_a_section_with_its_verdict_first(page):
    text = page.read_text()
    heads = re.findall(r"<h2[^>]*>(.*?)</h2>", text)
    assert heads[0] == "In short"
    assert [head.partition(" (")[2] for head in heads[1:5]] == ["suffix)", "needle)", "longbench)", "qa)"]
    for section in re.split(r"<h2", text)[2:6]:
        assert re.findall(r"<h3>(.*?)</h3>", section)[0] == "Verdict"
    assert "average of six tasks" in text
