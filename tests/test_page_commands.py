"""The pages: what they name exists (commands, options, methods, scripts, targets), headings."""

import re
from itertools import pairwise

import pytest

from kvcat.cli import app
from kvcat.cli.names import method_names
from kvcat.compress import make_compressor
from kvcat.errors import InputError
from kvcat.options import parse_spec
from page_commands import (
    ROOT,
    SHELL,
    command_name,
    commands,
    inline_code,
    option_names,
    pages,
    parsed_options,
    script_options,
    shell_lines,
)

PLUGINS = ("price-list", "strided,stride=2")
FOREIGN_OPTIONS = {
    "--hf-overrides",
    "--kv-cache-dtype",
    "--kv-cache-memory-bytes",
    "--gpu-memory-utilization",
    "--enforce-eager",
    "--block-size",
    "--no-deps",
    "--cache-type-k",
    "--cache-type-v",
    "--nproc-per-node",
    "--tensor-parallel-size",
    "--attention-backend",
}  # of vLLM, pip, llama.cpp and torchrun
TREE = [("command:", "app.py", "lists", "the", "commands,", "a", "file", "for", "each", "group")]
HISTORY = "CHANGELOG.md"  # it names options that are gone


def test_every_command_in_a_code_block_has_options_and_values_that_kvcat_accepts():
    complaints = []
    calls = [call for page in pages() for call in commands(page, shell_lines(page), "kvcat")]
    assert len(calls) > 50
    for call in calls:
        if set(PLUGINS) & set(call.words):
            continue  # the names of examples/plugin, which need not be installed
        if call.words in (("eval", "--help"), *TREE):
            continue
        if not command_name(call.words):
            complaints.append(f"{call}: no such command")
            continue
        try:
            parsed_options(call.words)
        except InputError as error:
            complaints.append(f"{call}: {error}")
    assert complaints == []


def test_every_code_block_has_a_language_that_is_read_here_or_holds_no_command():
    known = {*SHELL, "python", "toml", "output", "text"}
    complaints = []
    for page in pages():
        opening = re.findall(r"^```(\w*)\n.*?^```$", (ROOT / page).read_text("utf-8"), re.M | re.S)
        complaints += [f"{page}: {language}" for language in opening if language not in known]
    assert complaints == []


def test_every_command_in_the_prose_exists_and_has_the_options_that_it_is_named_with():
    complaints = []
    for page in pages():
        for call in commands(page, inline_code(page), "kvcat"):
            name = command_name(call.words)
            if not name and call.words[0] not in ("COMMAND", "eval", "theory"):
                complaints.append(f"{call}: no such command")
            if not name or page == HISTORY:
                continue
            options = {word.partition("=")[0] for word in call.words if word.startswith("--")}
            complaints += [f"{call}: {unknown}" for unknown in options - option_names(name)]
    assert complaints == []


def test_every_option_that_the_prose_names_is_one_of_a_command_or_of_a_script():
    known = FOREIGN_OPTIONS | script_options()
    for name in app.commands():
        known |= option_names(name)
    complaints = []
    for page in pages():
        for code in inline_code(page):
            options = re.findall(r"(?<![\w-])--[a-z][\w-]*", code)
            complaints += [f"{page}: {option}" for option in options if option not in known]
    assert complaints == []


def test_every_method_with_options_is_one_that_can_be_made():
    names = method_names()
    complaints = []
    num_methods = 0
    for page in pages():
        lines = [*shell_lines(page), *inline_code(page)]
        for line in lines:
            # benchmarks name a method and the text of its queries, METHOD@QUERIES
            for spec in re.findall(r"(?<![\w,\[-])[a-z][\w-]*,[\w]+=[^\s@]*", line):
                name, _, _ = spec.partition(",")
                names_a_file = spec.endswith((".json", "budgets=FILE"))
                if name not in names or names_a_file or spec.endswith("..."):
                    continue
                num_methods += 1
                try:
                    make_compressor(name, **parse_spec(spec)[1])
                except InputError as error:
                    complaints.append(f"{page}: {spec}: {error}")
    assert num_methods > 10
    assert complaints == []


@pytest.mark.parametrize("program", ["python", "make"])
def test_every_script_and_every_target_exists_and_a_script_has_its_options(program):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    complaints = []
    num_checked = 0
    for page in pages():
        lines = [*shell_lines(page), *inline_code(page)]
        for call in commands(page, lines, program):
            if program == "make":
                named = [word for word in call.words if "=" not in word and word.islower()]
                complaints += [str(call) for word in named if word not in targets]
            elif call.words[0].endswith(".py"):
                complaints += [f"{call}: {fault}" for fault in _script_faults(call.words)]
            num_checked += 1
    assert num_checked > 5
    assert complaints == []


def test_every_page_has_one_title_first_and_skips_no_level_of_headings():
    complaints = []
    for page in pages():
        text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text("utf-8"), flags=re.M | re.S)
        levels = [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
        steps = [later - level for level, later in pairwise(levels)]
        if levels[:1] != [1] or levels.count(1) > 1 or max(steps, default=0) > 1:
            complaints.append(f"{page}: {levels}")
    assert complaints == []


def _script_faults(words):
    script = ROOT / words[0]
    if not script.is_file():
        return ["no such script"]
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    return [option for option in options if option not in script_options()]
