"""Loss curves on record: a change of the code that changes them shows here.

``python tests/training/test_training_golden.py`` writes them anew; the commit that does so says why.
"""

import sys
import tempfile
from pathlib import Path

import pytest
from runs import POLICIES, config, records

from kvcat.training.loop import train

GOLDEN = Path(__file__).parent / "golden"
FIELDS = ("dense_loss", "masked_loss", "kl", "budget", "grad_norm")


def curve(policy, model, data, output):
    """One line a step: the losses of a short run."""
    train(config(model, data, output, policy=policy, max_steps=12, peak_lr=3e-3), progress=False)
    steps = [r for r in records(output) if r["kind"] == "train"]
    names = [name for name in FIELDS if name in steps[0]]
    lines = [" ".join(f"{record[name]:.6f}" for name in names) for record in steps]
    return "\n".join([" ".join(names), *lines]) + "\n"


def numbers(text):
    head, *lines = text.splitlines()
    return head, [[float(word) for word in line.split()] for line in lines]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_loss_curve_is_the_one_on_record(policy, tiny_folder, texts_folder, tmp_path):
    head, ours = numbers(curve(policy, tiny_folder, texts_folder, tmp_path / "run"))
    expected_head, expected = numbers((GOLDEN / f"{policy}.txt").read_text())
    assert head == expected_head
    for one, other in zip(ours, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tiny import write_texts, write_tiny_model

    with tempfile.TemporaryDirectory() as scratch:
        model, data = write_tiny_model(Path(scratch) / "tiny"), write_texts(Path(scratch) / "texts")
        GOLDEN.mkdir(exist_ok=True)
        for name in POLICIES:
            (GOLDEN / f"{name}.txt").write_text(curve(name, model, data, Path(scratch) / name))
