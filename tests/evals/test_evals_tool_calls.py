"""Tool calls: what fits a schema, and cases that depend on their seed and number alone."""

import json

import pytest

from kvcat.evals.evaluations.tools import FUNCTIONS, ToolCallTask, Tools
from tiny import byte_tokenizer, refusal

CALL = {"name": "set_timer", "arguments": {"person": "Anna", "minutes": 5}}
REFERENCES = (json.dumps(CALL), json.dumps([function.schema for function in FUNCTIONS[:6]]))


@pytest.mark.parametrize(
    ("answer", "valid", "function", "exact"),
    [
        (json.dumps(CALL), 1, 1, 1),
        (f"\n {json.dumps(CALL)}\nRequest: again", 1, 1, 1),
        (json.dumps({**CALL, "arguments": {"minutes": 6, "person": "Anna"}}), 1, 1, 0),
        (json.dumps({**CALL, "arguments": {"minutes": "5", "person": "Anna"}}), 0, 0, 0),
        (json.dumps({**CALL, "arguments": {"minutes": True, "person": "Anna"}}), 0, 0, 0),
        (json.dumps({**CALL, "arguments": {"minutes": 5}}), 0, 0, 0),
        (json.dumps({**CALL, "extra": 1}), 0, 0, 0),
        (
            '{"name": "convert_amount", "arguments": '
            '{"amount": 5, "source": "EUR", "target": "CHF"}}',
            1,
            0,
            0,
        ),
        (
            '{"name": "convert_amount", "arguments": '
            '{"amount": 5, "source": "CHF", "target": "EUR"}}',
            0,
            0,
            0,
        ),
        ('{"name": "return_item", "arguments": {}}', 0, 0, 0),
        ('{"name": ["set_timer"], "arguments": {}}', 0, 0, 0),
        (json.dumps(CALL)[:-1], 0, 0, 0),
        ("Anna", 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_an_answer_is_judged_by_schema_function_and_arguments(answer, valid, function, exact):
    assert ToolCallTask.judge(answer, REFERENCES) == {
        "schema_valid": valid,
        "right_function": function,
        "exact_match": exact,
    }


def test_the_right_answer_of_every_case_is_valid_and_its_request_names_the_arguments():
    tokenizer = byte_tokenizer()
    task = Tools.task(tokenizer, cases=24, num_functions=4)
    assert {example.stratum for example in task.examples} == {each.name for each in FUNCTIONS}
    for example in task.examples:
        answer = tokenizer.decode(example.answer)
        assert set(task.judge(answer, example.references).values()) == {1.0}
        context = tokenizer.decode(example.context)
        request = context.rpartition("Request: ")[2]
        for argument in json.loads(answer)["arguments"].values():
            assert (json.dumps(argument) if argument is True else str(argument)).lower() in (
                request.lower()
            )
        assert len(json.loads(example.references[1])) == 4
    assert Tools.task(tokenizer, cases=24, num_functions=4).examples == task.examples
    assert Tools.task(tokenizer, cases=9, num_functions=4).examples == task.examples[:9]
    assert (
        Tools.task(tokenizer, cases=9, num_functions=4, data_seed=1).examples != task.examples[:9]
    )
    assert "[2, 8], not 9" in refusal(Tools.task, tokenizer, num_functions=9)
