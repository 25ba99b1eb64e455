"""Check that the sources stay readable: python tools/check_style.py [--code] [FILE ...].

At most 3 % of the assignments may pack several values (`a, b = x, y`), no line may be longer than
100 columns, and names that say nothing are not used: in src/, tests/, benchmarks/, examples/, runs/
and tools/. There, in docs/ and in the pages of the project's root, habit words that readers stumble
over are named with a better word, and prose wraps at 100 columns; ``--code`` leaves this second
check out.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CODE_FOLDERS = ("src", "tests", "benchmarks", "examples", "runs", "tools")
MOST_COLUMNS = 100
MOST_PACKED = 0.03
VAGUE_NAMES = {"own", "found", "given", "rest", "part", "parts", "few", "more", "told"}
HABIT_WORDS = {
    r"\bgoes? on\b": "continues",
    r"\bwent on\b": "continued",
    r"\bstands? (?:beside|behind|below|above|in|for|there|at)\b": "is, follows, represents",
    r"\btold\b": "reported, named",
    r"\bwithout a word\b": "silently",
    r"\bon paper\b": "simulated",
    r"\bpose as\b": "look like",
    r"\bnothing else is said\b": "unless another is named",
    r"\bbeside\b": "next to",
    r"\bsaid again\b": "repeated",
    r"\bhands? on\b": "pass",
    r"\bis asked of\b": "is requested from",
    r"\bgive way\b": "are overwritten",
}

# Words that the product's code and pages avoid too; tests may use them.
PRODUCT_WORDS = {
    r"(?-i:\b[Rr]efus(?:e|es|ed|ing|al)\b)": "reject, is rejected, error",
    r"\btells?\b(?!\()": "reports, shows, distinguishes",
    r"\bsaid\b": "named, reported",
    r"\bbut for\b": "except",
    r"\bmade anew\b": "computed again",
    r"\bgives? what\b": "has the result of",
    r"\bas ever\b": "as usual",
    r"\ball the same\b": "still",
    r"\bshar(?:e|es|ed|ing) out\b": "allocate",
    r"\btake(?:s|n)? away\b": "removes",
    r"\bwhat follows\b": "the text after it",
    r"\banew\b": "again",
    r"\bwhole one\b": "whole cache, complete file",
    r"(?-i:\bThe same of\b)": "repeat the noun",
    r"\bstock engines?\b": "unmodified engines",
    r"\bof so many\b": "with that number of",
    r"\bcounts? alike\b": "count equally",
    r"\bthat draws? and\b": "randomised",
    r"\bevery other time\b": "half of the time",
    r"\bwith(?:out)? a look at\b": "without reading",
    r"\bknows? (?:of|no|nothing)\b": "does not cover, does not support",
    r"[\d}]%(?![\w(|])|:[,.\d]*%\}": "20 %, with a space",
}


CODE = tuple(f"{folder}/*.py" for folder in CODE_FOLDERS)
PAGES = ("docs/*.md", "benchmarks/*.md", "examples/*.md", "runs/*.md", "*.md")


@dataclass
class Findings:
    """What the check found, as lines for a person."""

    num_assignments: int = 0
    num_packed: int = 0
    lines: list[str] = field(default_factory=list)

    def add(self, path: Path, number: int, message: str) -> None:
        """Note a finding at a line of a file."""
        self.lines.append(f"{path}:{number}: {message}")


def check_code(path: Path, findings: Findings) -> None:
    """Count assignments and note long lines and vague names of a Python file."""
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > MOST_COLUMNS:
            findings.add(path, number, f"{len(line)} columns, more than {MOST_COLUMNS}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign):
            findings.num_assignments += 1
            target = node.targets[0]
            value = node.value
            findings.num_packed += isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        for name in _bound_names(node):
            if name in VAGUE_NAMES:
                findings.add(path, node.lineno, f"the name {name!r} does not say what it is")


def _bound_names(node: ast.AST) -> Iterator[str]:
    """Names that a node gives to values."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg


def check_words(path: Path, findings: Findings) -> None:
    """Note habit words of a page or of a Python file."""
    is_product = path.suffix == ".md" or path.parts[0] == "src"
    words = {**HABIT_WORDS, **PRODUCT_WORDS} if is_product else HABIT_WORDS
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        for pattern, better in words.items():
            match = re.search(pattern, line, flags=re.IGNORECASE)
            if match:
                findings.add(path, number, f"{match[0]!r}: say {better}")


def check_columns(path: Path, findings: Findings) -> None:
    """Note long lines in the prose of a page: not tables, pictures, headings, code."""
    is_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            is_code = not is_code
        is_prose = not is_code and not line.startswith(("|", "![", "<", "#"))
        if is_prose and len(line) > MOST_COLUMNS:
            findings.add(path, number, f"{len(line)} columns, more than {MOST_COLUMNS}")


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository that match."""
    listed = subprocess.run(
        ["git", "ls-files", *patterns], capture_output=True, text=True, check=True
    )
    return [Path(name) for name in listed.stdout.split()]


def main() -> None:
    """Print the findings; exit code 1 where there are any."""
    arguments = sys.argv[1:]
    code_alone = "--code" in arguments
    chosen = [Path(name) for name in arguments if name != "--code"]
    findings = Findings()
    for path in chosen or tracked(*CODE):
        if path.suffix == ".py":
            check_code(path, findings)
    pages = [] if code_alone else chosen or tracked(*CODE, *PAGES)
    for path in pages:
        is_table_of_words = path.name == Path(__file__).name
        if not is_table_of_words:
            check_words(path, findings)
        if path.suffix == ".md":
            check_columns(path, findings)
    share = findings.num_packed / max(1, findings.num_assignments)
    if share > MOST_PACKED:
        findings.lines.append(
            f"{100 * share:.1f} % of the assignments pack values, more than "
            f"{100 * MOST_PACKED:.0f} %"
        )
    print("\n".join(findings.lines))
    sys.exit(bool(findings.lines))


if __name__ == "__main__":
    main()
