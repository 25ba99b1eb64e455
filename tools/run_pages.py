"""Run what the pages print, as a newcomer would: python tools/run_pages.py FOLDER [PAGE ...].

FOLDER becomes a clone of the repository, with the files that the pages use as examples
(articles.parquet, report.txt, ...) and with examples/plugin installed in it. There every block of
commands of a page runs in a shell, and then the Python blocks of the page one after the other.
Commands that need a network, a GPU, a cluster or a second terminal are named and left out. Without
PAGE: README.md and the pages of docs/ whose commands run on one machine. SmolLM2-135M must be there
(make smollm2), and what `pip install -e ".[all]"` installs.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/compress.md",
    "docs/conversations.md",
    "docs/corpus.md",
    "docs/evaluation.md",
    "docs/extend.md",
    "docs/kvpress.md",
    "docs/serving.md",
    "docs/theory.md",
    "docs/training.md",
)
WITHOUT_PYTHON = {
    "docs/extend.md": "its files are those of examples/plugin, which is installed",
    "docs/serving.md": "needs a server in a second terminal",
}
LEFT_OUT = {
    r"^pip |^make ": "installs packages",
    r"hub:|s3://|torchrun|qwen2\.5|Qwen/|; a GPU": "needs a network or a GPU",
    r"^ray |--ray|^moto_server|^export AWS|fsspec": "needs a cluster or an object store",
    r"^kvcat serve|^kvcat chat|^vllm serve|^curl": "needs a second terminal",
    r"\./my-model|\./base|longbench|\ba\.safetensors|\bMODEL\b": "names what the reader has",
}
ARTICLES = {
    "articles/7": "The council met on 3 May. It was decided that the bridge closes in June.",
    "articles/9": "The library is open from nine to six. On Sundays it is closed all day.",
}
REPORT = "Rules: answer in one sentence.\n\n" + "\n".join(ARTICLES.values()) * 6
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def prepare(folder: Path) -> None:
    """Clone the repository into a folder and write the example files of the pages."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not folder.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    texts = [" ".join([text] * 8) for text in ARTICLES.values()]
    pq.write_table(pa.table({"id": list(ARTICLES), "text": texts}), folder / "articles.parquet")
    (folder / "report.txt").write_text(REPORT, encoding="utf-8")
    (folder / "rules.txt").write_text("Rules: answer in one sentence.\n", encoding="utf-8")
    (folder / "texts").mkdir(exist_ok=True)
    for name, text in ARTICLES.items():
        file_name = f"{name.replace('/', '-')}.txt"
        (folder / "texts" / file_name).write_text(text * 40, encoding="utf-8")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    options = ["--no-build-isolation", "--upgrade", "--target", str(folder / "packages")]
    subprocess.run([*install, *options, str(ROOT / "examples" / "plugin")], check=True)


def commands(page: str) -> list[str]:
    """The commands of a page, each with its continued lines."""
    text = (ROOT / page).read_text(encoding="utf-8")
    parsed: list[str] = []
    for language, code in _FENCED.findall(text):
        if language == "console":
            parsed += re.findall(r"^\$ ((?:.*\\\n)*.*)$", code, re.MULTILINE)
        elif language == "sh":
            parsed += _split(code)
    return parsed


def _split(code: str) -> list[str]:
    """The commands of a block: a line ends one unless it is continued or inside quotation marks."""
    parsed: list[str] = []
    command = ""
    for line in code.splitlines():
        command += line + "\n"
        if line.endswith(("\\", "|")) or not _is_complete(command):
            continue
        parsed.append(command.strip())
        command = ""
    return [command for command in parsed if command and not command.startswith("#")]


def _is_complete(command: str) -> bool:
    """Whether every quotation mark of a command is closed."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def python_code(page: str) -> str:
    """The Python blocks of a page as one program."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return "\n".join(code for language, code in _FENCED.findall(text) if language == "python")


def reason_to_leave_out(command: str) -> str:
    """Why a command cannot run here; empty: it can."""
    for pattern, reason in LEFT_OUT.items():
        if re.search(pattern, command, re.MULTILINE):
            return reason
    return ""


def run(command: list[str], folder: Path) -> bool:
    """Whether a command succeeds in a folder; its output and its seconds are printed."""
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    packages = [str(folder / "packages"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(packages).rstrip(os.pathsep)
    started = time.monotonic()
    ended = subprocess.run(command, cwd=folder, env=environment, check=False)
    print(f"[exit code {ended.returncode}, {time.monotonic() - started:.0f} s]", flush=True)
    return ended.returncode == 0


def main() -> None:
    """Exit code 1 if a command failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("pages", nargs="*", default=PAGES)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    prepare(folder)
    failed = []
    for page in arguments.pages:
        for command in commands(page):
            reason = reason_to_leave_out(command)
            print(f"\n{page} $ {command}" + (f"\n[left out: {reason}]" if reason else ""))
            sys.stdout.flush()
            if not reason and not run(["bash", "-c", command], folder):
                failed.append(f"{page}: {command}")
        code = python_code(page)
        if code and page in WITHOUT_PYTHON:
            print(f"\n{page}: its Python\n[left out: {WITHOUT_PYTHON[page]}]")
        elif code:
            print(f"\n{page}: its Python", flush=True)
            if not run([sys.executable, "-c", code], folder):
                failed.append(f"{page}: Python")
    print("\nfailed:\n" + "\n".join(failed) if failed else "\nall succeeded")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
