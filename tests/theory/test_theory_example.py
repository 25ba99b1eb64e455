"""The example that trains networks on the histogram runs from training to its table."""

import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_histogram.py"


def test_the_example_prints_a_row_for_every_network_and_number_of_slots(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--quick", "--seeds", "1"])
    names = runpy.run_path(str(EXAMPLE))
    names["QUICK"].steps, names["QUICK"].search_steps = 8, 3
    names["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 6 * 3 + 3 + 1 + 2 * 3  # a heading, trained networks, optimum, policy, found
    errors = {(line[:38].strip(), int(line[38:44])): float(line[44:53]) for line in lines[1:]}
    for name, r in errors:
        if r == 3:
            assert errors[name, 3] < 1e-3 < errors[name, 1]  # the whole cache is exact, one slot is not
    assert errors["compressible construction, its policy", 1] < 1e-4
    optimum = [errors["incompressible construction, optimum", r] for r in (1, 2)]
    assert all(errors["incompressible construction, found", r] >= optimum[r - 1] for r in (1, 2))
