"""The room of statistics is usable without the packages of models."""

import subprocess
import sys


def test_statistics_load_neither_torch_nor_an_evaluation():
    code = (
        "import sys, kvcat.stats; print({'torch', 'transformers', 'kvcat.evals'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
