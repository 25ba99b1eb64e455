"""Methods as text."""

import pytest

from kvcat.errors import InputError
from kvcat.methods import parse_method


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("keynorm", ("keynorm", {})),
        ("gradient,num_steps=20,init=random,lr=1e-3", ("gradient", {"num_steps": 20, "init": "random", "lr": 1e-3})),
        ("attention-matching,ridge=null,on_policy=true", ("attention-matching", {"ridge": None, "on_policy": True})),
        ("gradient,betas=[0.9,1],num_iters=None", ("gradient", {"betas": (0.9, 1), "num_iters": None})),
        (
            "gradient,init=[attention-matching,bounds=[-2,2]],num_steps=3",
            ("gradient", {"init": "attention-matching,bounds=[-2,2]", "num_steps": 3}),
        ),
        ("kvpress:SnapKVPress,window_size=8", ("kvpress:SnapKVPress", {"window_size": 8})),
    ],
)  # fmt: skip
def test_a_method_is_a_name_and_options(spec, expected):
    assert parse_method(spec) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "names no method"),
        ("num_steps=2", "names no method"),
        ("gradient,num_steps", "'num_steps' in method 'gradient,num_steps' is no option=value"),
        ("gradient,num_steps=", "is no option=value"),
        ("gradient,lr=1,lr=2", "option lr is given twice"),
    ],
)
def test_what_is_no_method_is_refused(spec, message):
    with pytest.raises(InputError, match=message):
        parse_method(spec)
