"""The command ``kvcat eval``: runs an evaluation from its options and prints the results."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcat import option_types as opt
from kvcat.cli import early
from kvcat.cli.options import labelled
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
    models = labelled(options.models)
    for folder in models.values():
        early.check_model(folder)
    process = int(os.environ.get("RANK", 0))
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    folders = _run_shard(options, models, (process, num_processes))
    if num_processes > 1:
        names = " ".join(map(str, folders))
        done = f"shard {process} of {num_processes} is done"
        print(f"{done}; when all are done: kvcat report {names}")
        return

    from kvcat.evals.records import read_records

    records: list[Record] = []
    for folder in folders:
        records += [record for record in read_records(folder) if record.model in models]
    table = options.result_table(records)
    if table is None:
        _print_report(folders, options.out / "report")
    else:
        _print_table(table, options.out)


def _run_shard(
    options: "Evaluation", model_folders: Mapping[str, str], shard: "Shard"
) -> list[Path]:
    """Evaluate the models on every count-th batch; the results folders."""
    import kvcat
    from kvcat.evals import Plan
    from kvcat.models import load_tokenizer

    settings = options.settings()
    speed = settings.pop("speed", False)
    tokenizer = load_tokenizer(next(iter(model_folders.values())))
    plans = {
        folder: Plan.of(task, **settings) for folder, task in _tasks(options, tokenizer).items()
    }
    device = options.device
    if device == "cuda":  # under torchrun, the GPU of this process
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    models = {
        label: kvcat.load(folder, dtype=options.dtype, device=device)
        for label, folder in model_folders.items()
    }
    for plan in plans.values():  # all of them before the first evaluation
        plan.check(models)
    for folder, plan in plans.items():
        plan.run(models, folder, shard=shard, speed=speed)
    return list(plans)


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
