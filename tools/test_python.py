"""Run the fast tests with other Pythons: python tools/test_python.py 3.12 3.13.

For every version: find an interpreter, compile all sources with warnings as errors, set up
.venv-pythonVERSION and run the tests there. A version without an interpreter is skipped and named.
Where the package index has a torch with CUDA alone, which is gigabytes large, the tests are
skipped too; ``--any-torch`` installs it all the same.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = ("src", "tests", "benchmarks", "examples", "runs", "tools")
EXTRAS = "gguf,report,tensorboard"
TEST_PACKAGES = ("pytest", "pytest-xdist", "hypothesis", "beartype")
CUDA_PREFIXES = ("nvidia-", "cuda-")


def find_interpreter(version: str) -> str | None:
    """The command of an interpreter of this version, or None: from PATH, else from pyenv."""
    pyenv = Path.home() / ".pyenv" / "versions"
    candidates = [f"python{version}"]
    candidates += [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for candidate in candidates:
        command = [candidate, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]
        if shutil.which(candidate) is None:
            continue
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:
            return candidate
    return None


def compile_sources(interpreter: str) -> None:
    """Compile every source; a syntax error or a warning of the compiler is an error."""
    with tempfile.TemporaryDirectory() as folder:
        command = [interpreter, "-W", "error", "-X", f"pycache_prefix={folder}"]
        subprocess.run([*command, "-m", "compileall", "-q", *SOURCES], check=True)


def needs_cuda(python: Path, torch: str) -> bool:
    """Whether pip would install CUDA with this torch; nothing is downloaded."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        arguments = ["--dry-run", "--ignore-installed", "--report", str(report), torch]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)
        packages = json.loads(report.read_text())["install"]
    names = [package["metadata"]["name"] for package in packages]
    return any(name.startswith(CUDA_PREFIXES) for name in names)


def run_tests(interpreter: str, version: str, torch: str, tests: list[str], any_torch: bool) -> str:
    """Set up an environment and run the tests; returns a line for the summary."""
    folder = Path(f".venv-python{version}")
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    if not any_torch and needs_cuda(python, torch):
        return f"sources compile; tests skipped: only a CUDA build of {torch} is on the index"
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, "--editable", f".[{EXTRAS}]", torch, *TEST_PACKAGES], check=True)
    subprocess.run([python, "-m", "pytest", "-q", "-n", "auto", *tests], check=True)
    return f"tests pass with {torch}"


def main() -> None:
    """Print a line for each version; an error of a command ends the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--torch", default="torch", help="requirement, such as torch==2.13.0")
    parser.add_argument(
        "--any-torch", action="store_true", help="install a torch with CUDA as well"
    )
    parser.add_argument("--tests", nargs="*", default=[], help="folders of tests")
    arguments = parser.parse_args()
    lines = []
    for version in arguments.versions:
        interpreter = find_interpreter(version)
        if interpreter is None:
            lines.append(f"Python {version}: skipped: no interpreter on PATH or in pyenv")
            continue
        compile_sources(interpreter)
        outcome = run_tests(
            interpreter, version, arguments.torch, arguments.tests, arguments.any_torch
        )
        lines.append(f"Python {version}: {outcome}")
    print("\n".join(lines))


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed: {' '.join(map(str, error.cmd))}")
