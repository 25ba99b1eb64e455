"""The command ``kvcat eval``: runs an evaluation from its options and prints the results."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcat.cli import early
from kvcat.cli import options as opt
from kvcat.errors import InputError

if TYPE_CHECKING:
    from kvcat.evals import Evaluation, Record, ResultTable, Task
    from kvcat.evals.records import Shard


def evaluation_options(name: str) -> "type[Evaluation]":
    """The dataclass of an evaluation's options."""
    from kvcat.evals import find_evaluation

    return find_evaluation(name)


def run_evaluation(options: "Evaluation") -> None:
    """Run an evaluation with these options, write its report and print the main figures."""
    early.check_device(options.device)
    for spec in options.method_specs():
        early.check_method(spec)
    labels = _find_models(options.models)
    process = int(os.environ.get("RANK", 0))
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    folders = _run_shard(options, (process, num_processes))
    if num_processes > 1:
        names = " ".join(map(str, folders))
        done = f"shard {process} of {num_processes} is done"
        print(f"{done}; when all are done: kvcat report {names}")
        return

    from kvcat.evals.records import read_records

    records: list[Record] = []
    for folder in folders:
        records += [record for record in read_records(folder) if record.model in labels]
    table = options.result_table(records)
    if table is None:
        _print_report(folders, options.out / "report")
    else:
        _print_table(table, options.out)


def _run_shard(options: "Evaluation", shard: "Shard") -> list[Path]:
    """Evaluate the models on every count-th batch; the results folders."""
    from kvcat.evals import evaluate

    tasks = _checked_tasks(options)
    settings = options.settings()
    folders = _find_models(options.models)
    models = _load_models(folders, _process_device(options.device), options.dtype)
    for task in tasks.values():  # checks all tasks before the first evaluation
        for label, model in models.items():
            task.check(label, *model)
    for folder, task in tasks.items():
        evaluate(task, models, out_dir=folder, shard=shard, **settings)
    return list(tasks)


def _checked_tasks(options: "Evaluation") -> "dict[Path, Task]":
    """The tasks by folder; ``InputError`` if their settings cannot be evaluated."""
    from kvcat.evals import configuration
    from kvcat.models import load_tokenizer

    settings = options.settings()
    settings.pop("speed", None)
    tokenizer = load_tokenizer(next(iter(opt.labelled(options.models).values())))
    tasks = _tasks(options, tokenizer)
    for task in tasks.values():
        configuration(task, **settings)
    return tasks


def _find_models(items: tuple[str, ...]) -> dict[str, str]:
    """The folders or Hub names of models by label; ``InputError`` if one cannot be found."""
    folders = opt.labelled(items)
    for folder in folders.values():
        early.check_model(folder)
    return folders


def _load_models(folders: dict[str, str], device: str, dtype: str) -> dict[str, Any]:
    """The model and tokenizer of each label."""
    import kvcat

    return {
        label: kvcat.load(folder, dtype=dtype, device=device) for label, folder in folders.items()
    }


def _process_device(device: str) -> str:
    """The device; under torchrun, ``cuda`` is the GPU of this process."""
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device == "cuda" else device


def _tasks(options: "Evaluation", tokenizer: Any) -> dict[Path, "Task"]:
    """The tasks by folder, one for every value of the ``folder_option``."""
    values: list[Any] = []
    if options.folder_option:
        values = list(dict.fromkeys(opt.flat(getattr(options, options.folder_option))))
    if len(values) < 2:
        return {options.out: options.make_task(tokenizer, values[0] if values else None)}
    tasks: dict[Path, Task] = {}
    for value in values:
        folder = options.out / re.sub(r"[^\w.-]+", "-", str(value)).strip("-.")
        if folder in tasks:
            raise InputError(
                f"two --{options.folder_option} would write to the same folder {folder}"
            )
        tasks[folder] = options.make_task(tokenizer, value)
    return tasks


def _print_report(folders: list[Path], output: Path) -> None:
    """Write the report of evaluations; print the main figures and the page's path."""
    from kvcat.report import headline_text, read_results, write_report

    results = [read_results(folder) for folder in folders]
    page = write_report(results, output)
    for result in results:
        print(headline_text(result))
    print(page)


def _print_table(table: "ResultTable", folder: Path) -> None:
    """Write an evaluation's table and plot to the folder; print the table and both paths."""
    from kvcat.report.plots import save_line_plot

    table_file = folder / f"{table.name}.csv"
    table.frame.to_csv(table_file, index=False)
    plot_file = save_line_plot(table.plot, folder / f"{table.name}.png")
    print(table.text)
    print(table_file)
    print(plot_file)
