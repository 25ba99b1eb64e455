"""Build the package and try it as a new user: python tools/release_check.py.

Builds sdist and wheel, checks their metadata and contents, installs the wheel without extras into
an empty environment, and runs there the commands that the core offers and README.md's Python, whose
output must be the printed one. Then adds the extra "report" and runs the commands of README.md that
need nothing else. Nothing is uploaded.
"""

import argparse
import email
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
OPTIONAL = ("datasets", "matplotlib", "pandas", "pyarrow", "scipy")
WITHOUT_EXTRAS = "import importlib.util, sys; sys.exit(any(map(importlib.util.find_spec, {names})))"
LARGEST_SDIST = 5_000_000
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BUILD_TOOLS = ("build", "hatchling", "twine")


def make_environment(folder: Path, *packages: str) -> Path:
    """The interpreter of a new environment with these packages."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-compile", *packages], check=True
    )
    return python


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist and the wheel, with metadata that an index accepts."""
    python = make_environment(folder / "tools", *BUILD_TOOLS)
    target = folder / "dist"
    options = ["--no-isolation", "--outdir", str(target)]
    subprocess.run([python, "-m", "build", *options, str(ROOT)], check=True)
    subprocess.run([python, "-m", "twine", "check", "--strict", *target.iterdir()], check=True)
    (sdist,) = target.glob("*.tar.gz")
    (wheel,) = target.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Stop if a version differs, or if the sdist holds results."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_file,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(metadata_file))
    version = metadata["Version"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if f"\nversion: {version}\n" not in citation:
        sys.exit(f"CITATION.cff does not have version {version}")
    if f"\n## {version}" not in changelog:
        sys.exit(f"CHANGELOG.md has no section for version {version}")
    readme = str(metadata.get_payload())
    dead = [target for target in _LINK.findall(readme) if ":" not in target and target[0] != "#"]
    if len(readme) < 1000 or dead:
        sys.exit(f"the readme of the package is missing or has relative links: {dead}")
    with tarfile.open(sdist) as archive:
        results = [name for name in archive.getnames() if "/docs/" in name or "/out/" in name]
    if results:
        sys.exit(f"the sdist holds {results[0]}")
    if sdist.stat().st_size > LARGEST_SDIST:
        sys.exit(f"the sdist has {sdist.stat().st_size / 1e6:.1f} MB")
    print(f"version {version}: wheel {wheel.stat().st_size / 1e6:.1f} MB", flush=True)


def try_core(folder: Path, wheel: Path, torch: str) -> None:
    """Compress, describe and answer with the core alone; what needs an extra says so."""
    python = make_environment(folder / "bare", torch, str(wheel))
    absent = WITHOUT_EXTRAS.format(names=list(OPTIONAL))
    subprocess.run([python, "-c", absent], check=True)
    kvcat = str(folder / "bare" / "bin" / "kvcat")
    page = folder / "page.txt"
    page.write_text((ROOT / "CITATION.cff").read_text(encoding="utf-8"), encoding="utf-8")
    cache = folder / "page.safetensors"
    commands = [
        ["--help"],
        ["compress", "kvcat-base", "--text", page, "--keep", "0.1", "-o", cache],
        ["info", cache],
        ["generate", "kvcat-base", "--cache", cache, "--prompt", "import ", "--max-new-tokens", 4],
    ]
    for arguments in commands:
        subprocess.run([kvcat, *map(str, arguments)], check=True, cwd=folder)
    refused = subprocess.run(
        [kvcat, "report", folder, "-o", folder / "report"],
        check=False,
        capture_output=True,
        text=True,
    )
    message = refused.stderr.strip()
    if refused.returncode != 2 or "pip install 'kvcat[report]'" not in message:
        sys.exit(f"kvcat report without its extra: {message}")
    print(message)


def readme_blocks(language: str) -> list[str]:
    """The blocks of README.md in a language."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return [code for name, code in _BLOCK.findall(readme) if name == language]


def readme_folder(folder: Path) -> Path:
    """A folder with the file that README.md compresses."""
    work = folder / "work"
    work.mkdir()
    page = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    (work / "CITATION.cff").write_text(page, encoding="utf-8")
    return work


def try_readme_python(python: Path, work: Path) -> None:
    """Run README.md's Python; stop if it prints something else than README.md shows."""
    (code,) = readme_blocks("python")
    (shown,) = readme_blocks("output")
    ended = subprocess.run(
        [python, "-c", code], cwd=work, check=True, stdout=subprocess.PIPE, text=True
    )
    print(ended.stdout, flush=True)
    if ended.stdout != shown:
        sys.exit(f"README.md shows other output:\n{shown}")


def try_readme_commands(binaries: Path, work: Path, wheel: Path) -> None:
    """Run the commands of README.md on the small model, with the extra that they need."""
    requirement = f"kvcat[report] @ {wheel.as_uri()}"
    subprocess.run(
        [binaries / "pip", "install", "--quiet", "--no-compile", requirement], check=True
    )
    lines = "".join(readme_blocks("sh")).splitlines()
    commands = [line for line in lines if line.startswith("kvcat ")]
    if not commands:
        sys.exit("README.md has no commands for the shell")
    for command in commands:
        print(f"$ {command}", flush=True)
        name, *arguments = shlex.split(command)
        subprocess.run([binaries / name, *arguments], check=True, cwd=work)
    if not (work / "report" / "report.html").exists():
        sys.exit("the commands of README.md wrote no report")


def main() -> None:
    """Stop with the first failure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", default="torch", help="requirement, such as torch==2.13.0")
    torch = parser.parse_args().torch
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sdist, wheel = build(folder)
        check_contents(sdist, wheel)
        try_core(folder, wheel, torch)
        binaries = folder / "bare" / "bin"
        work = readme_folder(folder)
        try_readme_python(binaries / "python", work)
        try_readme_commands(binaries, work, wheel)
    print("the package can be released")


if __name__ == "__main__":
    main()
