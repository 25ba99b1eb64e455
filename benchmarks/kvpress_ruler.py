"""kvpress' RULER protocol on compact caches, in result folders as kvpress' evaluate.py writes them.

    python benchmarks/kvpress_ruler.py --model Qwen/Qwen3-8B --data hub:simonjegou/ruler \\
        --data-dir 4096 --methods attention-matching snapkv --compression-ratio 0.5 0.75 0.9 \\
        --device cuda --dtype bfloat16 --output-dir results

The protocol is that of ``evaluation/evaluate.py`` in https://github.com/NVIDIA/kvpress: the context
is the beginning of a user's turn (without a chat template: BOS and the text), it is compressed
alone, and every question about it is answered greedily from the same cache, after the rest of the
turn and the answer's prefix. ``compression_ratio`` is the fraction of slots REMOVED. An answer's
score is the share of references that it contains (for qa tasks: whether it contains one), in per
cent, averaged for each task.

Each method and ratio has a folder DATASET__DATA_DIR__MODEL__METHOD__RATIO with ``predictions.csv``,
``metrics.json`` and ``config.yaml``. ``answers.jsonl`` in it grows with every context, and the same
command continues a run that was stopped. ``no_press`` is the dense cache, with ratio 0.

--data is hub:OWNER/NAME, or a folder of .parquet or .jsonl files with the data set's columns
(context, question, answer_prefix, answer, max_new_tokens, task). Methods that are fitted to queries
use a repetition of the context, which needs positions for twice its length.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from peers import LEARNING, method_of
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvcat
from kvcat.cache import CompactCache
from kvcat.compress import Trace, trace
from kvcat.compress.documents import reconstruction_of_tokens
from kvcat.errors import InputError, run_script
from kvcat.evals.answers import greedy_answers
from kvcat.files import append_jsonl, atomic_write, read_jsonl

DENSE = "no_press"
COLUMNS = ("context", "question", "answer_prefix", "answer", "max_new_tokens", "task")
SEED = 42  # of kvpress, for --fraction
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True)
class Cell:
    """A method at one size, with the folder of its results."""

    method: str
    ratio: float  # fraction of the slots that are removed
    folder: Path

    @property
    def answers_file(self) -> Path:
        """The answers so far, a line for each context."""
        return self.folder / "answers.jsonl"

    @property
    def is_done(self) -> bool:
        """Whether the results are complete."""
        return (self.folder / "metrics.json").exists()


def read_questions(data: str, data_dir: str | None, fraction: float) -> pd.DataFrame:
    """The rows of the data set, or the part of them that kvpress would draw.

    Raises:
        InputError: no files, a missing column, or two answer prefixes for one context.
    """
    if data.startswith("hub:"):
        from datasets import load_dataset

        name = data.removeprefix("hub:")
        frame = load_dataset(name, data_dir=data_dir, split="test").to_pandas()
    else:
        folder = Path(data) / (data_dir or "")
        tables = [pd.read_parquet(file) for file in sorted(folder.glob("*.parquet"))]
        tables += [pd.read_json(file, lines=True) for file in sorted(folder.glob("*.jsonl"))]
        if not tables:
            raise InputError(f"{folder} has no .parquet and no .jsonl file")
        frame = pd.concat(tables, ignore_index=True)
    missing = [name for name in COLUMNS if name not in frame]
    if missing:
        raise InputError(f"{data} has no column {', '.join(missing)}")
    if fraction < 1.0:
        frame = frame.sample(frac=fraction, random_state=SEED)
    if (frame.groupby("context")["answer_prefix"].nunique() != 1).any():
        raise InputError(f"{data} has a context with two answer prefixes")
    return frame


def turn_parts(tokenizer: PreTrainedTokenizerBase, context: str) -> tuple[str, str]:
    """The text to compress, and the text between question and answer, as kvpress writes them."""
    if tokenizer.chat_template is None:
        return (tokenizer.bos_token or "") + context, "\n"
    separator = "\n" + "#" * len(context)
    turn = [{"role": "user", "content": context + separator}]
    options: dict[str, Any] = {"add_generation_prompt": True, "enable_thinking": False}
    text = tokenizer.apply_chat_template(turn, tokenize=False, **options)
    head, tail = str(text).split(separator)
    return head, tail


def folder_name(model: str, method: str, ratio: float, options: argparse.Namespace) -> str:
    """The name of a result folder, as in kvpress' ``get_results_dir``."""
    pieces = [
        options.dataset,
        options.data_dir or "",
        model.replace("/", "--"),
        re.sub(r"[^\w.,=+-]", "-", method),
        f"{ratio:.2f}",
    ]
    if options.fraction < 1.0:
        pieces.append(f"fraction{options.fraction:.3f}")
    if options.max_context_length is not None:
        pieces.append(f"max_context{options.max_context_length}")
    return "__".join(filter(None, pieces))


def contains_score(task: str, answer: str, references: Sequence[str]) -> float:
    """The score of an answer in [0, 1]: the share of references that it contains; any, for qa."""
    text = _CONTROL_CHARACTERS.sub("", answer.strip()).strip().lower()
    contained = [reference.lower() in text for reference in references]
    if task.split("_")[0] == "qa":
        return float(any(contained))
    return sum(contained) / len(contained)


def task_scores(frame: pd.DataFrame) -> dict[str, dict[str, float]]:
    """The mean score of each task in per cent, as in kvpress' ``metrics.json``."""
    rows = zip(frame["task"], frame["predicted_answer"], frame["answer"], strict=True)
    scores = [contains_score(task, answer, list(references)) for task, answer, references in rows]
    means = frame.assign(score=scores).groupby("task")["score"].mean()
    return {str(task): {"string_match": round(100.0 * mean, 2)} for task, mean in means.items()}


@dataclass(frozen=True)
class Reader:
    """A model that answers questions about contexts."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_context_length: int | None

    def context_ids(self, head: str) -> torch.Tensor:
        """The token ids of a context, one row, cut at the end if it is too long."""
        limit = self.max_context_length or min(self.tokenizer.model_max_length, int(1e10))
        ids = self.tokenizer.encode(head, add_special_tokens=False)[:limit]
        return torch.tensor([ids], device=self.model.device)

    def traces(self, ids: torch.Tensor, methods: Sequence[str]) -> dict[bool, Trace]:
        """A trace of the context alone, and one with its repetition if a method needs it."""
        made = {False: trace(self.model, ids, supervision="self")}
        if any(method.startswith(LEARNING) for method in methods):
            made[True] = trace(self.model, reconstruction_of_tokens(self.tokenizer, ids))
        return made

    def answers(self, cache: CompactCache, questions: Sequence[str], most: int) -> list[str]:
        """The greedy answers to questions about the context of a cache."""
        encode = self.tokenizer.encode
        ids = [encode(question, add_special_tokens=False) for question in questions]
        answers = greedy_answers(self.model, cache, ids, most)
        return [self.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]


def answer_context(reader: Reader, rows: pd.DataFrame, cells: Sequence[Cell]) -> None:
    """Answer all questions about one context in every cell, and write the answers."""
    head, tail = turn_parts(reader.tokenizer, rows["context"].iloc[0])
    questions = [
        question + tail + prefix
        for question, prefix in zip(rows["question"], rows["answer_prefix"], strict=True)
    ]
    most = int(rows["max_new_tokens"].iloc[0])
    ids = reader.context_ids(head)
    methods = list(dict.fromkeys(cell.method for cell in cells))
    traces = reader.traces(ids, [method for method in methods if method != DENSE])
    for method in methods:
        of_method = [cell for cell in cells if cell.method == method]
        if method == DENSE:
            caches = iter([traces[False].dense_cache()])
        else:
            keeps = [1.0 - cell.ratio for cell in of_method]
            caches = method_of(method).each(traces[method.startswith(LEARNING)], keeps)
        for cell, cache in zip(of_method, caches, strict=True):
            answers = reader.answers(cache, questions, most)
            record = {"rows": rows.index.tolist(), "answers": answers}
            append_jsonl(cell.answers_file, record)


def finish(cell: Cell, frame: pd.DataFrame, config: dict[str, Any]) -> dict[str, Any]:
    """Write predictions, metrics and configuration of a cell whose contexts are all answered."""
    answers = {}
    for record in read_jsonl(cell.answers_file):
        answers.update(zip(record["rows"], record["answers"], strict=True))
    predicted = frame.assign(
        predicted_answer=[answers[row] for row in frame.index], compression_ratio=cell.ratio
    )
    predicted.drop(columns="context").to_csv(cell.folder / "predictions.csv", index=False)
    text = yaml.safe_dump(config, sort_keys=False)
    (cell.folder / "config.yaml").write_text(text, encoding="utf-8")
    metrics = task_scores(predicted)
    with atomic_write(cell.folder / "metrics.json") as partial:  # last: it marks a complete cell
        partial.write_text(json.dumps(metrics, indent=4), encoding="utf-8")
    return metrics


def wanted_cells(options: argparse.Namespace) -> list[Cell]:
    """The dense cache and every method at every ratio, with their folders."""
    for ratio in options.compression_ratio:
        if not 0.0 <= ratio < 1.0:
            raise InputError(f"compression ratio {ratio:g} is outside [0, 1)")
    pairs = [(DENSE, 0.0)]
    pairs += [(method, ratio) for method in options.methods for ratio in options.compression_ratio]
    cells = []
    for method, ratio in pairs:
        folder = options.output_dir / folder_name(options.model, method, ratio, options)
        cells.append(Cell(method, ratio, folder))
    return cells


def run(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The metrics of every cell, by the name of its folder; what is answered is not repeated."""
    cells = wanted_cells(options)
    for method in options.methods:
        method_of(method)  # rejects an unknown method before the model is loaded
    frame = read_questions(options.data, options.data_dir, options.fraction)
    missing = [cell for cell in cells if not cell.is_done]
    if missing:
        loaded = kvcat.load(options.model, device=options.device, dtype=options.dtype)
        reader = Reader(*loaded, options.max_context_length)
        for cell in missing:
            cell.folder.mkdir(parents=True, exist_ok=True)
        known = {
            cell: {row for record in read_jsonl(cell.answers_file) for row in record["rows"]}
            if cell.answers_file.exists()
            else set()
            for cell in missing
        }
        groups = [rows for _, rows in frame.groupby("context")]
        for rows in tqdm(groups, desc="contexts"):
            unanswered = [cell for cell in missing if rows.index[0] not in known[cell]]
            if unanswered:
                answer_context(reader, rows, unanswered)
    for cell in missing:
        finish(cell, frame, configuration(options, cell))
    return {
        cell.folder.name: json.loads((cell.folder / "metrics.json").read_text(encoding="utf-8"))
        for cell in cells
    }


def configuration(options: argparse.Namespace, cell: Cell) -> dict[str, Any]:
    """The fields of kvpress' ``config.yaml`` that have a meaning here, and the version of kvcat."""
    return {
        "dataset": options.dataset,
        "data_dir": options.data_dir,
        "model": options.model,
        "device": options.device,
        "press_name": cell.method,
        "compression_ratio": cell.ratio,
        "fraction": options.fraction,
        "max_new_tokens": None,
        "max_context_length": options.max_context_length,
        "compress_questions": False,
        "output_dir": str(options.output_dir),
        "model_kwargs": {"dtype": options.dtype},
        "press_init_command": f"kvcat {kvcat.__version__}: {cell.method}",
        "seed": SEED,
    }


def main() -> None:
    """Print the average score of each folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="kvcat-base", help="folder or Hub name")
    parser.add_argument("--data", default="hub:simonjegou/ruler", help="hub:OWNER/NAME or folder")
    parser.add_argument("--dataset", default="ruler", help="name of the data in folders")
    parser.add_argument("--data-dir", help="part of the data set, such as 4096")
    parser.add_argument("--methods", nargs="+", default=["attention-matching"], metavar="METHOD")
    parser.add_argument("--compression-ratio", type=float, nargs="+", default=[0.5, 0.75, 0.9])
    parser.add_argument("--fraction", type=float, default=1.0, help="share of the questions")
    parser.add_argument(
        "--max-context-length", type=int, help="tokens, of longer contexts the first"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("results"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    for name, metrics in run(parser.parse_args()).items():
        scores = [scores["string_match"] for scores in metrics.values()]
        print(f"{sum(scores) / len(scores):6.2f}  {name}")


if __name__ == "__main__":
    run_script(main)
