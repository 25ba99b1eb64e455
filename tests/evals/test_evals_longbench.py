import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from longbench_files import ASSETS, SAMPLE, row, written
from tokenizers.processors import TemplateProcessing

from kvcat.compress import INSTRUCTION, AttentionMatching, GradientCompression, slots_for
from kvcat.errors import InputError
from kvcat.evals.longbench import LongBenchTask
from kvcat.evals.longbench_prompt import LongBenchPrompt, cut_middle, tokenised
from kvcat.evals.longbench_rows import longbench_examples
from kvcat.evals.running import Method, evaluate
from kvcat.evals.task import Baseline, Prepared, Task
from tiny import byte_tokenizer, stock_model


def with_start_token():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", start)]
    )
    return tokenizer


@pytest.fixture(scope="module", params=["plain", "start token"])
def tokenizer(request):
    return byte_tokenizer() if request.param == "plain" else with_start_token()


@pytest.fixture(scope="module")
def plain():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = stock_model(
        "qwen2", vocab_size=302, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=800, initializer_range=0.3,
    )  # fmt: skip
    return made.double().eval()


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    return longbench_examples(
        written(tmp_path_factory.mktemp("rows") / "r.jsonl", map(row, range(4))), sub_domains=None
    )


@pytest.fixture(scope="module")
def task(examples):
    return LongBenchTask(examples, "fixture", max_tokens=500, keep_ratios=(0.1, 0.5, 1.0))


@pytest.fixture(scope="module")
def prepared(task, model, plain):
    return task.prepare(model, plain, task.examples[:2])


@torch.no_grad()
def full_forward(model, before, prompt):
    """Log-likelihood of the four continuations, each in one plain forward over everything."""
    totals = []
    for choice in prompt.choices:
        log_probs = model(input_ids=torch.tensor([[*before, *choice]]), use_cache=False).logits[0].log_softmax(-1)
        totals.append(sum(float(log_probs[len(before) + i - 1, token]) for i, token in enumerate(choice)))
    return totals


def assert_scored_as(values, totals, right):
    assert values["nll_choice"] == pytest.approx(
        -float(torch.tensor(totals, dtype=torch.float64).log_softmax(0)[right]), abs=1e-6
    )
    wrong = max(total for index, total in enumerate(totals) if index != right)
    assert values["margin"] == pytest.approx(totals[right] - wrong, abs=1e-6)
    assert values["accuracy"] == float(totals[right] > wrong)


def test_the_prompt_reads_as_the_papers(tokenizer, examples):
    example = next(e for e in examples if e.name == "id0")
    prompt = tokenised(example, tokenizer)
    start = "<bos>" if prompt.opening else ""
    assert tokenizer.decode(prompt.prefix) == (
        f"{start}Please read the following text and answer the question below.\n\n{example.context}"
    )
    assert tokenizer.decode(prompt.question) == (
        "\n\nWhat is the correct answer to this question: Which is small, 0?\n"
        "(A) the cat\n(B) a dog\n(C) a river and a tree\n(D) it\n\nThe correct answer is ("
    )
    assert [tokenizer.decode(choice) for choice in prompt.choices] == ["A)", "B)", "C)", "D)"]


def test_both_copies_of_the_reconstruction_sequence_are_the_same_tokens(tokenizer, model, examples):
    prepared = LongBenchTask(examples, "fixture", max_tokens=400).prepare(model, tokenizer, examples[:1])
    ids, prefix = prepared.trace.input_ids[0].tolist(), prepared.prompts[0].prefix
    begun, second = len(prepared.prompts[0].opening), prepared.trace.supervision_start
    assert ids[: len(prefix)] == prefix
    assert ids[second:] == prefix[begun:]
    assert tokenizer.decode(ids[len(prefix) : second]) == INSTRUCTION
    assert 397 <= len(ids) <= 400


def lengths(opening, lead, context, instruction, question, choice):
    return LongBenchPrompt(
        [1] * opening, [2] * lead, list(range(context)), [3] * instruction, [4] * question, [[5] * choice]
    )


@given(
    st.integers(0, 1), st.integers(1, 8), st.integers(0, 90), st.integers(1, 12), st.integers(1, 40), st.integers(1, 3),
    st.integers(60, 120),
)  # fmt: skip
def test_the_context_keeps_the_longest_equal_head_and_tail_that_fit(
    opening, lead, context, instruction, question, choice, most
):
    prompt = lengths(opening, lead, context, instruction, question, choice)

    def fits(num_context):
        copies = opening + 2 * (lead + num_context) + instruction
        return max(copies, opening + lead + num_context + question + choice) <= most

    kept = prompt.fitted(most).context
    if fits(context):
        assert kept == list(range(context))
    else:
        half = len(kept) // 2
        assert kept == [*range(half), *range(context - half, context)]
        assert fits(len(kept))
        assert not fits(len(kept) + 2)


def test_a_cut_reconstruction_sequence_has_its_length_to_the_token():
    for most, expected in ((100, 100), (101, 100), (102, 100), (103, 100), (104, 104)):
        assert 2 * len(lengths(0, 10, 500, 20, 5, 2).fitted(most).prefix) + 20 == expected


def test_a_long_question_leaves_less_of_the_context():
    assert len(lengths(0, 10, 500, 20, 70, 2).fitted(100).context) == 100 - 10 - 70 - 2


@pytest.mark.parametrize(("room", "kept"), [(6, [0, 1, 2, 3, 4, 5]), (5, [0, 1, 4, 5]), (2, [0, 5]), (1, []), (0, [])])
def test_the_middle_is_what_is_cut(room, kept):
    assert cut_middle(list(range(6)), room) == kept


def test_shortened_prefixes_have_as_many_tokens_as_the_budget():
    prompt = lengths(1, 10, 500, 20, 5, 2)
    assert [len(prompt.shortened(count)) for count in (511, 111, 110, 13, 11, 4)] == [511, 111, 109, 13, 11, 4]
    assert prompt.shortened(15) == [1, *[2] * 10, 0, 1, 498, 499]
    assert prompt.shortened(4) == [1, 2, 2, 2]


def test_the_task_and_what_it_prepares_follow_the_protocol(task, prepared):
    assert isinstance(task, Task)
    assert isinstance(prepared, Prepared)
    assert [(b.name, b.keep_ratio) for b in task.baselines] == [
        ("dense", 1.0), ("no-context", 0.0), ("truncated", 0.1), ("truncated", 0.5)
    ]  # fmt: skip
    described = task.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["sub_domains"] == {"Academic": 1, "Legal": 1, "Literary": 1, "Table QA": 1}
    assert len({task.batch_key(example) for example in task.examples}) == 4


def test_the_manifest_changes_with_any_text(task, examples):
    other = replace(task, examples=[*examples[:3], replace(examples[3], context=examples[3].context + ".")])
    assert other.describe()["manifest"] != task.describe()["manifest"]


def test_contexts_that_are_too_long_are_compressed_at_the_length_that_fits(task, prepared, plain):
    traced, prompt = prepared.trace, prepared.prompts[0]
    assert len(tokenised(task.examples[0], plain).context) > len(prompt.context)
    assert traced.prefix_len == len(prompt.prefix)
    assert 497 <= traced.input_ids.shape[1] <= 500


def test_dense_scores_equal_a_full_forward_of_the_same_ids(prepared, model):
    dense = prepared.baseline(Baseline("dense", 1.0))
    for values, prompt, right in zip(dense, prepared.prompts, prepared.right, strict=True):
        assert_scored_as(values, full_forward(model, [*prompt.prefix, *prompt.question], prompt), right)


def test_no_context_scores_equal_a_full_forward_of_the_question(prepared, model):
    for values, prompt, right in zip(
        prepared.baseline(Baseline("no-context", 0.0)), prepared.prompts, prepared.right, strict=True
    ):
        assert_scored_as(values, full_forward(model, prompt.question, prompt), right)


@pytest.mark.parametrize("keep", [0.02, 0.1, 0.5])
def test_truncated_scores_equal_a_full_forward_of_the_shortened_text(prepared, model, keep):
    for values, prompt, right in zip(
        prepared.baseline(Baseline("truncated", keep)), prepared.prompts, prepared.right, strict=True
    ):
        budget = slots_for(len(prompt.prefix), keep, None)
        shortened = prompt.shortened(budget)
        assert budget - 1 <= len(shortened) <= budget
        assert_scored_as(values, full_forward(model, [*shortened, *prompt.question], prompt), right)


@pytest.mark.parametrize("name", ["start token", "plain"])
def test_a_start_token_stands_before_every_sequence_that_is_scored(model, examples, name):
    tokenizer = with_start_token() if name == "start token" else byte_tokenizer()
    prepared = LongBenchTask(examples, "fixture", max_tokens=500).prepare(model, tokenizer, examples[:1])
    (prompt,), (right,) = prepared.prompts, prepared.right
    start = [tokenizer.bos_token_id] if name == "start token" else []
    (alone,) = prepared.baseline(Baseline("no-context", 0.0))
    assert_scored_as(alone, full_forward(model, [*start, *prompt.question], prompt), right)
    (dense,) = prepared.baseline(Baseline("dense", 1.0))
    text = [*start, *prompt.lead, *prompt.context, *prompt.question]
    assert_scored_as(dense, full_forward(model, text, prompt), right)


@pytest.mark.parametrize(
    "method", [AttentionMatching(), GradientCompression(num_steps=2, activation_checkpointing=True)]
)
def test_keeping_every_slot_at_step_0_scores_as_the_dense_cache(prepared, method):
    dense = prepared.baseline(Baseline("dense", 1.0))
    if isinstance(method, GradientCompression):
        caches = dict(method.snapshots(prepared.trace, keep_ratio=1.0))
        assert list(caches) == [0, 1, 2]
    else:
        caches = {None: method(prepared.trace, keep_ratio=1.0)}
    for cache in caches.values():
        assert prepared.score(cache) == dense


def test_gradient_snapshots_are_scored_and_move(prepared):
    method = GradientCompression(num_steps=2, init="first", activation_checkpointing=True)
    found = {step: prepared.score(cache) for step, cache in method.snapshots(prepared.trace, keep_ratio=0.2)}
    assert list(found) == [0, 1, 2]
    assert found[0] != found[2]
    (dense, _), (values, _) = prepared.baseline(Baseline("dense", 1.0)), found[2]
    names = ("accuracy", "margin", "nll_choice", "choice")
    assert set(values) == {*names, *(f"dense_{name}" for name in names)}
    assert all(values[f"dense_{name}"] == dense[f"dense_{name}"] == dense[name] for name in names)


def test_an_example_scores_the_same_alone_as_in_a_batch(task, model, plain, prepared):
    method = AttentionMatching()
    together = prepared.score(method(prepared.trace, keep_ratio=0.2))
    for index, example in enumerate(task.examples[:2]):
        alone = task.prepare(model, plain, [example])
        (values,) = alone.score(method(alone.trace, keep_ratio=0.2))
        assert values == pytest.approx(together[index], abs=1e-6)


def test_the_loop_of_all_evaluations_runs_it_and_a_second_run_does_nothing(task, model, plain, tmp_path, monkeypatch):
    methods = ["first", Method("gradient", {"num_steps": 1, "init": "first"})]
    small = replace(task, examples=task.examples[:2], keep_ratios=(0.1,))
    settings = {"batch_size": 8, "progress": False}
    found = evaluate(small, {"base": (model, plain)}, methods, [0.2], tmp_path, **settings)
    cells = {(r.method, r.keep_ratio, r.step) for r in found}
    assert cells == {
        ("dense", 1.0, None), ("no-context", 0.0, None), ("truncated", 0.1, None), ("first", 0.2, None),
        ("gradient", 0.2, 0), ("gradient", 0.2, 1),
    }  # fmt: skip
    assert {(r.example, r.stratum) for r in found} == {(e.name, e.stratum) for e in small.examples}
    by_cell = {(r.method, r.step, r.example): r.values for r in found}
    for example in small.examples:
        assert by_cell["gradient", 0, example.name] == pytest.approx(by_cell["first", None, example.name], abs=1e-6)
    monkeypatch.setattr(LongBenchTask, "prepare", lambda *_: pytest.fail("prepared again"))
    assert evaluate(small, {"base": (model, plain)}, methods, [0.2], tmp_path, **settings) == found


def test_prefixes_of_unequal_lengths_do_not_share_a_batch(examples, model, plain):
    task = LongBenchTask(examples, "fixture", max_tokens=4000)
    with pytest.raises(InputError, match="unequal lengths cannot share a batch"):
        task.prepare(model, plain, examples)


def test_a_prompt_that_leaves_no_room_is_not_prepared(examples, model, plain):
    with pytest.raises(InputError, match=r"leave -\d+ of max_tokens=150 for the context; at least 2 are needed"):
        LongBenchTask(examples, "fixture", max_tokens=150).prepare(model, plain, examples[:1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 801}, "max_tokens=801 exceeds the 800 positions of model 'tiny'"),
        ({"max_tokens": 150}, r"row 'id\d': prompt and question leave -\d+ of max_tokens=150 for the context"),
        ({"keep_ratios": (0.0,)}, r"keep ratio 0 is outside \(0, 1\]"),
        ({"keep_ratios": (1.2,)}, r"keep ratio 1.2 is outside \(0, 1\]"),
    ],
)
def test_a_mistake_is_told_before_heavy_work(examples, model, plain, options, said):
    with pytest.raises(InputError, match=said):
        LongBenchTask(examples, "fixture", **{"max_tokens": 500, **options}).check("tiny", model, plain)


def test_a_model_without_tokenizer_or_with_too_few_tokens_is_refused(task, model, plain):
    task.check("tiny", model, plain)
    with pytest.raises(InputError, match="model 'tiny' has no tokenizer"):
        task.check("tiny", model, None)
    small = stock_model(
        "qwen2", vocab_size=90, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=800,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"token \d+ is outside the vocabulary of model 'small', 90 tokens"):
        task.check("small", small, plain)


@pytest.fixture(scope="module")
def qwen():
    folder = ASSETS / "tokenizers" / "qwen2.5"
    if not folder.is_dir() or not SAMPLE.is_file():
        pytest.skip("no LongBench v2 sample and Qwen2.5 tokenizer in ../shared/assets")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_a_real_row_that_fits_is_untouched_and_a_longer_one_is_cut_to_the_token(qwen):
    example = longbench_examples(str(SAMPLE))[0]
    prompt = tokenised(example, qwen)
    whole = qwen.encode(example.context, verbose=False)
    assert prompt.fitted(2 * len(whole) + 1000).context == whole
    cut = prompt.fitted(4096)
    half = len(cut.context) // 2
    assert cut.context == whole[:half] + whole[-half:]
    assert 4093 <= 2 * len(cut.prefix) + len(cut.instruction) <= 4096
    assert qwen.convert_ids_to_tokens(cut.question[-1]) == "Ġ("
    assert [qwen.convert_ids_to_tokens(choice) for choice in cut.choices] == [[letter, ")"] for letter in "ABCD"]


def test_the_papers_method_runs_on_a_real_row(qwen):
    torch.manual_seed(0)
    model = stock_model(
        "qwen2", vocab_size=151_936, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32_768, tie_word_embeddings=True,
    ).eval()  # fmt: skip
    task = LongBenchTask(longbench_examples(str(SAMPLE))[:1], "sample", max_tokens=512, keep_ratios=(0.1,))
    task.check("random", model, qwen)
    prepared = task.prepare(model, qwen, task.examples)
    method = GradientCompression(num_steps=1, init="first", activation_checkpointing=True)
    found = {step: prepared.score(cache) for step, cache in method.snapshots(prepared.trace, keep_ratio=0.1)}
    assert list(found) == [0, 1]
    assert all(torch.tensor(list(values.values())).isfinite().all() for (values,) in found.values())
