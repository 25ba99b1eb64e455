"""What evaluations and folders of results reject, each in one line."""

import dataclasses
import json
import re
import string
from pathlib import Path

from small_evaluations import Characters, tiny
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

import kvcat
from kvcat.data.rows import read_rows
from kvcat.evals import (
    Record,
    ResultsFolder,
    SuffixTask,
    Window,
    compare_models,
    corpus_documents,
    evaluate,
    models_of,
    read_config,
    read_costs,
    read_records,
    summarise,
    windows_from_documents,
)
from kvcat.evals.evaluations.longbench import LongBench, LongBenchTask
from kvcat.evals.evaluations.needle import Needle
from kvcat.evals.evaluations.qa import QA, QAExample, QATask, read_examples
from kvcat.evals.evaluations.ruler import Ruler
from kvcat.evals.evaluations.suffix import Suffix
from kvcat.evals.questions import Question, QuestionTask
from kvcat.evals.runner import Plan
from kvcat.evals.task import vocabulary
from tiny import byte_tokenizer, refusal_with, rejections

CONFIG = {"evaluation": "suffix", "dataset": "t", "num_examples": 2, "methods": [], "prefix_len": 8}
NAMES = ("base", "abc", "float32", "first", "{}", 0.1, None, None, "texts", "", "doc")
RECORD = Record(*NAMES, "0", {"kl": 0.3, "nll": 1e-17})
DOCUMENTS = [(f"d{i}", "".join(chr(200 * i + j) for j in range(20 + 10 * i))) for i in range(4)]
TEXTS = {
    "_id": "id0",
    "domain": "Single-Document QA",
    "sub_domain": "Literary",
    "difficulty": "easy",
    "length": "short",
    "question": "Which is small?",
    "choice_A": "the cat",
    "choice_B": "a dog",
    "choice_C": "a river and a tree",
    "choice_D": "it",
    "answer": "A",
    "context": "the cat sees a red house " * 20,
}
PIQA = {"goal": "Boil water.", "sol1": "Use a pot ", "sol2": "Use a hat", "label": 0}
WINOGRANDE = {"sentence": "no blank", "option1": "Ann", "option2": "Bob", "answer": "1"}
ARC = {"id": "M1", "question": "What is hot?", "answerKey": "D"}
ARC["choices"] = {"text": ["ice", "fire"], "label": ["A", "B"]}


def line(**changes):
    return json.dumps({**dataclasses.asdict(RECORD), **changes})


def labelled(*labels, differ=False):
    """A record of each model; their weights are the same, or differ."""
    weights = labels if differ else ("abc",) * len(labels)
    pairs = zip(labels, weights, strict=True)
    return [dataclasses.replace(RECORD, model=each, fingerprint=of) for each, of in pairs]


def read_line(folder, damaged, kind="records"):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / f"{kind}.jsonl").write_text(f"{damaged}\n{line()}\n")
    return read_records(folder) if kind == "records" else read_costs(folder)


def config_of(folder, **changes):
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder)


def folder_of_folders(tmp_path):
    """As ``kvcat eval ruler --length 200 300`` makes it, next to a report."""
    for name in ("300", "200", "report"):
        (tmp_path / name).mkdir()
    (tmp_path / "200" / "records.jsonl").touch()
    for shard in (0, 1):
        (tmp_path / "300" / f"records-{shard}-of-2.jsonl").touch()
    return read_config(tmp_path)


def rows(folder, name, content):
    if content is not None:
        (folder / name).write_bytes(content)
    return list(read_rows(str(folder / name)))


def window(length=8, name="0"):
    return Window("d", name, (1,) * length, 4)


def draw(**changes):
    settings = {"prefix_len": 8, "suffix_len": 4, "per_document": 2, "seed": 1, **changes}
    return windows_from_documents(DOCUMENTS, Characters(), **settings)


def suffix_check(folder, texts, tokenizer):
    """The check of windows of a text for a model with this tokenizer."""
    model, mine = kvcat.load(folder)
    options = {"split": "all", "prefix": 20, "suffix": 8, "windows": 1}
    task = Suffix.task(mine, str(texts / "00.txt"), **options)
    return task.check("base", model, tokenizer)


def longbench_check(folder, *, max_tokens=500, tokenizer=None):
    """The check of one row for a model of 800 positions."""
    model = tiny(0, vocab_size=302, hidden_size=32, max_position_embeddings=800)
    examples = longbench_rows(folder, TEXTS).examples
    task = LongBenchTask(examples, "fixture", max_tokens=max_tokens)
    return task.check("tiny", model, tokenizer)


def longbench_rows(folder, *rows, domains=("all",)):
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return LongBench.task(None, data=str(folder / "a.jsonl"), sub_domain=domains)


def qa_rows(folder, task, *rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_examples(task, str(folder / "rows.jsonl"))


def qa_check(*, context="Boil water.", tokenizer=None):
    model = tiny(0, vocab_size=300, hidden_size=32, max_position_embeddings=128)
    example = QAExample("piqa:4", "4", "piqa", (context,) * 2, ("dog " * 200, "cat"), 0)
    return QATask((example,)).check("m", model, tokenizer)


def merging_tokenizer(text):
    """A tokenizer with one token for a whole text, as SuperBPE has them for several words."""
    backend = Tokenizer(BPE(unk_token="?"))
    texts = [text] * 9 + list(string.printable)
    special = ["?", "<eos>"]
    backend.train_from_iterator(texts, BpeTrainer(vocab_size=300, special_tokens=special))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="?")


class Matching(QuestionTask):
    @staticmethod
    def judge(answer, references):
        return {"match": float(references[0] in answer)}


def question_check(tokenizer, *, words=None, **sizes):
    """The check of a question for a small model, with a vocabulary or None."""
    options = {"vocab_size": 300, "hidden_size": 32, "max_position_embeddings": 256, **sizes}
    question = Question("d", "0", "", (299,) * 24, (7,), (6,), ("e",), 5)
    task = Matching("fixture", (question,), {}, words or vocabulary(byte_tokenizer()))
    return task.check("base", tiny(0, **options), tokenizer)


def not_compressed(tmp_path):
    example = QAExample("piqa:4", "4", "piqa", ("a", "a"), ("dog", "cat"), 0)
    return evaluate(QATask((example,)), {"m": (tiny(0), None)}, ["first"], [0.5], tmp_path)


def plan(methods=("first",), keep_ratios=(0.5,), seeds=(0,), windows=None):
    task = SuffixTask(windows or (window(),), "noise")
    return Plan.of(task, methods, keep_ratios, seeds=seeds)


def without_harness(monkeypatch, tokenizer):
    monkeypatch.setattr("kvcat.evals.evaluations.qa.find_spec", lambda _: None)
    return qa_check(tokenizer=tokenizer)


@rejections(
    # files of results
    ("damaged", lambda tmp_path: read_line(tmp_path, "{broken")),
    ("kl of example '0' of 'doc' is nan, not a number",
     lambda tmp_path: read_line(tmp_path, line(values={"kl": float("nan")}))),
    ("is '0.1', not a number", lambda tmp_path: read_line(tmp_path, line(values={"kl": "0.1"}))),
    ("exact_match of example '0' of 'doc' is 1.5: a share is in",
     lambda: dataclasses.replace(RECORD, values={"exact_match": 1.5})),
    ("reserved name 'step'", lambda: dataclasses.replace(RECORD, values={"step": 1.0})),
    ("not a record: ValueError: it lacks",
     lambda tmp_path: read_line(tmp_path, '{"model": "base"}')),
    ("second, different record of example '0' of 'doc': base, first, keep",
     lambda tmp_path: read_line(tmp_path, line(values={"kl": 0.5}))),
    ("damaged", lambda tmp_path: read_line(tmp_path, "{oops", "costs")),
    ("not a cost: it has no method",
     lambda tmp_path: read_line(tmp_path, '{"model": "base"}', "costs")),
    ("no evaluation 'magic'; there are longbench, needle",
     lambda tmp_path: config_of(tmp_path, evaluation="magic")),
    ("it has no methods", lambda tmp_path: config_of(tmp_path, methods=None)),
    ("a method: it has no options",
     lambda tmp_path: config_of(tmp_path, methods=[{"name": "first"}])),
    ("a method: it has no name", lambda tmp_path: config_of(tmp_path, methods=["first"])),
    ("is not a results folder", lambda tmp_path: read_config(tmp_path / "none")),
    (r"name those in it: .*200 .*300$", folder_of_folders),
    ("model 'base' come from two different models",
     lambda: models_of([RECORD, dataclasses.replace(RECORD, example="1", fingerprint="other")])),
    ("'kvcat@1' have the same weights", lambda: models_of(labelled("kvcat@0", "kvcat@1"))),
    ("'kvcat@1' would count as two runs",
     lambda: models_of(labelled("kvcat@1", "kvcat", differ=True))),
    ("'b@1' have the same weights",
     lambda tmp_path: ResultsFolder(tmp_path, {}).check_models(
         {label: {"fingerprint": "f", "dtype": "float32"} for label in ("b@0", "b@1")})),
    ("two data sets", lambda: summarise([RECORD, dataclasses.replace(RECORD, dataset="other")])),
    ("no record of model 'kvcat'", lambda: compare_models([RECORD], "kvcat")),
    # what to evaluate
    ("^first at keep ratio 0.5 is given 2 times", lambda: plan(keep_ratios=(0.5, 0.2, 0.5))),
    ("^first at keep ratio 0.5 is given 2 times", lambda: plan(("first", "random", "first"))),
    ("2 examples of document 'd' are called '0'", lambda: plan(windows=(window(), window()))),
    ("document 'd' lies in two strata, '' and 'x'",
     lambda: plan(windows=(window(), dataclasses.replace(window(name="1"), stratum="x")))),
    ("^a seed is given twice: 0, 1, 0", lambda: plan(("random",), seeds=(0, 1, 0))),
    # data
    ("a.jsonl cannot be read: JSONDecodeError",
     lambda tmp_path: rows(tmp_path, "a.jsonl", b'{"a": 1}\n{torn')),
    ("b.parquet cannot be read: ArrowInvalid",
     lambda tmp_path: rows(tmp_path, "b.parquet", b"no parquet")),
    ("d.parquet cannot be read: FileNotFoundError",
     lambda tmp_path: rows(tmp_path, "d.parquet", None)),
    ("arxiv is used completely: it has no split 'train'",
     lambda: corpus_documents("arxiv", "train", 9)),
    # suffix
    (r"900 \+ 4 tokens; the longest of 4 has 50", lambda: draw(prefix_len=900)),
    ("suffix_len is 1", lambda: draw(suffix_len=1)),
    ("limit is 0", lambda: draw(limit=0)),
    (
        "share the name 'a'",
        lambda: windows_from_documents(
            [("a", "x"), ("b", "x"), ("a", "y")], Characters(), prefix_len=8, suffix_len=4
        ),
    ),
    ("supervision must be one of suffix, first-half, reconstruction, not 'both'",
     lambda: SuffixTask((window(),), "noise", "both")),
    ("a suffix of at least 4, not 3", lambda: SuffixTask((window(7),), "noise", "first-half")),
    ("unequal lengths", lambda: SuffixTask((window(7), window(8, "1")), "noise")),
    (
        r"reconstruction sequences: \d+ tokens exceed the model's 256 positions",
        lambda tiny_folder: SuffixTask(
            (Window("d", "0", (30,) * 150, 140),), "noise", "reconstruction"
        ).check("base", *kvcat.load(tiny_folder)),
    ),
    (
        "needs the tokenizer of model 'base'",
        lambda tiny_folder: SuffixTask((window(),), "noise", "reconstruction").check(
            "base", kvcat.load(tiny_folder)[0], None
        ),
    ),
    (
        "made with, model 'base' has another one",
        lambda tiny_folder, texts_folder: suffix_check(
            tiny_folder, texts_folder, kvcat.load("kvcat-base")[1]
        ),
    ),
    # questions
    ("model 'base' has none", lambda: question_check(None)),
    ("model 'base' has another one", lambda: question_check(byte_tokenizer(), words="else")),
    ("outside the vocabulary of model 'base', 20 tokens",
     lambda: question_check(byte_tokenizer(), vocab_size=20)),
    (r"sequences: \d+ tokens exceed the model's 40 positions",
     lambda: question_check(byte_tokenizer(), max_position_embeddings=40)),
    # needle and RULER
    ("per_depth is 0", lambda tokenizer: Needle.task(tokenizer, per_depth=0)),
    ("no RULER task 'qa'; there are niah_single",
     lambda tokenizer: Ruler.task(tokenizer, 440, tasks=("qa",))),
    ("vt: 60 tokens are too few: the text needs at least",
     lambda tokenizer: Ruler.task(tokenizer, 60, tasks=("vt",))),
    # LongBench
    ("sequences: 801 tokens exceed the model's 800 positions",
     lambda tmp_path, tokenizer: longbench_check(tmp_path, max_tokens=801, tokenizer=tokenizer)),
    (r"row 'id0': prompt and question leave -\d+ of max_tokens=150 for the context",
     lambda tmp_path, tokenizer: longbench_check(tmp_path, max_tokens=150, tokenizer=tokenizer)),
    ("longbench needs the tokenizer of model 'tiny'", lambda tmp_path: longbench_check(tmp_path)),
    ("row 2 of .*a.jsonl has no text 'sub_domain'",
     lambda tmp_path: longbench_rows(tmp_path, TEXTS, {"_id": "x"})),
    ("row 1 of .*a.jsonl: answer 'E' is not one of A, B, C, D",
     lambda tmp_path: longbench_rows(tmp_path, {**TEXTS, "answer": "E"})),
    ("row 2 of .*a.jsonl has the _id 'id0' of an earlier row",
     lambda tmp_path: longbench_rows(tmp_path, TEXTS, TEXTS)),
    ("a.jsonl has no row of sub-domain Legal; it has Literary",
     lambda tmp_path: longbench_rows(tmp_path, TEXTS, domains=["Legal"])),
    # multiple choice
    ("rows.jsonl, row 2 is not a row of piqa: KeyError: 'sol2'",
     lambda tmp_path: qa_rows(tmp_path, "piqa", PIQA, {**PIQA, "sol2": None})),
    ("rows.jsonl, row 1 is not a row of winogrande: ValueError: its choices are not at least",
     lambda tmp_path: qa_rows(tmp_path, "winogrande", WINOGRANDE)),
    ("row 1 is not a row of arc_easy: ValueError: 'D' is not in list",
     lambda tmp_path: qa_rows(tmp_path, "arc_easy", ARC)),
    ("has no rows", lambda tmp_path: qa_rows(tmp_path, "piqa")),
    ("no QA task 'boolq'; there are hellaswag", lambda: QA.task(None, tasks=["boolq"])),
    ("limit is 0", lambda: QA.task(None, limit=0)),
    ("none has no file hellaswag", lambda: QA.task(None, data=Path("none"))),
    (r"none has no file piqa\*\.jsonl", lambda: QA.task(None, data=Path("none"), tasks=["piqa"])),
    ("qa needs the tokenizer of model 'm'", lambda: qa_check()),
    (r"model 'm', choices of piqa 4: \d+ tokens exceed the model's 128 positions",
     lambda tokenizer: qa_check(tokenizer=tokenizer)),
    ("m', piqa 4: the tokens of 'cat' merge into those before them",
     lambda: qa_check(tokenizer=merging_tokenizer("Boil water. cat"))),
    ("qa is evaluated without compression", not_compressed),
    (r"pip install .*\[harness\]", without_harness),
)  # fmt: skip
def test_what_cannot_be_evaluated_or_read_is_rejected_in_one_line(message, call, request):
    assert re.search(message, refusal_with(request, call))
