import os
import shlex

import pytest
import torch

from kvcat.precision import tf32_facts, tf32_products
from kvcat.provenance import command_line, provenance


def test_commands_name_no_folder_outside_the_working_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for typed, shown in (
        ("/usr/bin/kvcat eval --keep 0.1", "kvcat eval --keep 0.1"),
        ("kvcat eval /home/someone/models/base", "kvcat eval .../base"),
        (
            "kvcat --out=/home/someone/out base=/home/someone/base",
            "kvcat --out=.../out base=.../base",
        ),
        ("kvcat ~/models/base ../x/y", "kvcat .../base .../y"),
        (f"kvcat runs/base {tmp_path}/runs/a", "kvcat runs/base runs/a"),
        ("/usr/lib/kvcat/__main__.py demo", "python -m kvcat demo"),
        (
            "kvcat base=/home/bob/lr=3/export file:///home/bob/x",
            "kvcat base=.../lr=3/export file:.../x",
        ),
        ("kvcat a=/home/bob/x,b=1 '/home/bob/What is it?'", "kvcat a=.../x,b=1 '.../What is it?'"),
    ):
        assert command_line(shlex.split(typed)) == shown


def test_provenance_names_versions_and_hardware_as_text_and_no_home():
    facts = provenance()
    assert {
        "command",
        "kvcat",
        "torch",
        "transformers",
        "python",
        "platform",
        "cpu",
        "threads",
    } <= facts.keys()
    assert all(isinstance(value, str) and value for value in facts.values())
    assert os.path.expanduser("~") not in facts.values()


@pytest.mark.parametrize(
    ("device", "switch", "inside"),
    [("cuda", None, "high"), ("cuda", "0", "highest"), ("cpu", None, "highest")],
)
def test_tf32_is_for_gpus_unless_nvidias_switch_is_off_and_ends_with_the_block(
    device, switch, inside, monkeypatch
):
    if switch is not None:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", switch)
    with tf32_products(torch.device(device)):
        assert torch.get_float32_matmul_precision() == inside
    assert torch.get_float32_matmul_precision() == "highest"
    assert tf32_facts(torch.zeros(1)) == {}
