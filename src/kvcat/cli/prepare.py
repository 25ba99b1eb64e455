"""``kvcat prepare``: text to a folder of tokens that training maps into memory."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcat.cli.options import SeedOption
from kvcat.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_WORKERS = 32


def prepare_command(
    data: Annotated[
        str,
        typer.Argument(
            help="installed, a text file, .jsonl or .parquet, a folder or quoted pattern of them, or hub:NAME."
        ),
    ],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", "--model", help="Folder or Hub name of the model that will be trained.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Training tokens to stop after; without it all text is read.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that tokenise; default one a core, 0 none.")
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Tokenise text once into a folder, for `kvcat train --data FOLDER` on one node or many.

    Documents for training and for validation go into files of their own, EOS after each; test documents are left out.
    Any sequence length can be cut from them. Stopped at any moment, the same command continues.

    Example: kvcat prepare hub:HuggingFaceFW/fineweb-edu/sample-10BT --model Qwen/Qwen2.5-0.5B -o fineweb
    """
    words = load_tokenizer(tokenizer)

    from kvcat.data import prepare

    with _Bar(max_tokens) as bar:
        index = prepare(
            data,
            words,
            output,
            max_tokens=max_tokens,
            workers=_cores() if workers is None else workers,
            seed=seed,
            on_progress=bar.update,
        )
    train, validation = index["splits"]["train"], index["splits"]["validation"]
    print(
        f"{output}: {train['tokens']:,} training tokens of {train['documents']:,} documents, "
        f"{validation['tokens']:,} validation tokens of {validation['documents']:,}"
    )


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder, of the package's model, or of a Hub name, of which no weights are fetched.

    Raises:
        InputError: none there, or no way to the Hub.
    """
    where, local = str(Path(name).expanduser()), True
    if not Path(where).is_dir():
        from kvcat.models.hub import BASE_NAME, local_folder

        local = name == BASE_NAME or Path(where).exists() or name.startswith((".", "/", "~"))
        where = str(local_folder(name)) if local else name

    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        # whatever the folder's content makes transformers raise is the folder's fault
        if local:
            raise InputError(f"cannot load the tokenizer of {name}: {_one_line(error)}") from error
    from kvcat.network import hub_obstacle

    if obstacle := hub_obstacle():
        raise InputError(f"{name} is neither a folder nor in the local Hub cache, and {obstacle}")
    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except Exception as error:
        raise InputError(f"cannot get the tokenizer of {name} from the Hub: {_one_line(error)}") from error


class _Bar:
    """Tokens so far on standard error; where there is no terminal, nothing."""

    def __init__(self, max_tokens: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("tokens", total=max_tokens)
        self._max_tokens = max_tokens

    def __enter__(self) -> "_Bar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, progress: Any) -> None:
        """Show how far ``prepare`` is: of the tokens wanted, or of the files."""
        tokens = progress.parts["train"].tokens
        told = (
            f"{tokens / 1e6:,.1f} M tokens, file {min(progress.file + 1, progress.num_files)} of {progress.num_files}"
        )
        total, done = (progress.num_files, progress.file) if self._max_tokens is None else (self._max_tokens, tokens)
        self._bar.update(self._task, description=told, total=total, completed=done)


def _cores() -> int:
    """Workers for this machine's cores, those that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
