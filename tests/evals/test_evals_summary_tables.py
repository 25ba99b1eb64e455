import dataclasses

import numpy as np
import pytest
from test_evals_summary import record

from kvcat.errors import InputError
from kvcat.evals import compare_models, summarise
from kvcat.evals.rows import compare_models as old_compare
from kvcat.evals.rows import summarise as old_summarise


def records(model, shift, seed=3):
    rng = np.random.default_rng(seed)
    made = []
    for i in range(24):
        delta, kl = float(rng.normal(0.2, 0.1)) + shift, float(rng.uniform(0.1, 0.3)) + shift
        for keep in (0.1, 0.4):
            known = {"keep_ratio": keep, "stratum": "ab"[i % 2]}
            made.append(record(model, f"d{i % 12}", str(i), delta=delta, kl=kl, **known))
    return made


def test_the_table_gives_the_old_figures():
    own = records("kvcat", -0.05) + records("control", 0.0)
    table = summarise(own).set_index(["stratum", "model", "keep_ratio", "metric"])
    for by_stratum in (False, True):
        for row in old_summarise(own, by_stratum=by_stratum):
            for name, e in row.metrics.items():
                got = table.loc[(row.stratum, row.model, row.keep_ratio, name)]
                np.testing.assert_array_equal([got.value, got.low, got.high], [e.value, e.low, e.high])
                assert (got.num_examples, got.num_documents) == (row.num_examples, row.num_documents)
    table = compare_models(own, "control").set_index(["stratum", "keep_ratio", "metric"])
    for row in old_compare(own, [("kvcat", "control")]):
        for name, e in row.differences.items():
            got = table.loc[("", row.keep_ratio, name)]
            np.testing.assert_array_equal([got.difference, got.low, got.high], [e.value, e.low, e.high])
            assert got.verdict.replace("level", "not distinguishable") == row.verdict(name)


def test_holm_leaves_the_primary_cell_alone_and_corrects_the_others_of_its_metric():
    own = records("kvcat", -0.01) + records("control", 0.0, seed=4)
    table = compare_models(own, "control", primary={"method": "first", "keep_ratio": 0.4, "metric": "kl"})
    assert table.primary.sum() == 1
    (primary,) = table[table.primary].itertuples()
    assert (primary.keep_ratio, primary.metric, primary.stratum) == (0.4, "kl", "")
    assert np.isnan(primary.p_holm)
    other = table[(table.stratum == "") & (table.metric == "kl") & ~table.primary]
    assert other.p_holm.tolist() == other.p.tolist()
    nll = table[(table.stratum == "") & (table.metric == "nll")]
    assert nll.p_holm.min() == pytest.approx(min(1.0, 2 * nll.p.min()))


def test_records_of_two_data_sets_and_an_unknown_reference_are_refused():
    own = records("kvcat", 0.0)
    with pytest.raises(InputError, match="two data sets"):
        summarise([*own, dataclasses.replace(own[0], dataset="other")])
    with pytest.raises(InputError, match="no records of model 'base'"):
        compare_models(own, "base")


def test_training_seeds_become_one_row_whose_interval_knows_of_them():
    seeds = [dataclasses.replace(r, model=f"kvcat@{s}") for s in range(3) for r in records("kvcat", 0.1 * s)]
    own = seeds + records("control", 0.0)
    table = summarise(own)
    kl = table[(table.metric == "kl") & (table.stratum == "") & (table.keep_ratio == 0.1)].set_index("model")
    assert kl.loc["kvcat"].num_seeds == 3
    assert kl.loc["kvcat"].value == pytest.approx(kl.loc["control"].value + 0.1)
    assert kl.loc["kvcat"].high - kl.loc["kvcat"].low > 2 * (kl.loc["control"].high - kl.loc["control"].low)
    compared = compare_models(own, "control")
    row = compared[(compared.metric == "kl") & (compared.stratum == "") & (compared.keep_ratio == 0.1)].iloc[0]
    assert row.difference == pytest.approx(0.1)
    assert row.low < 0.05
