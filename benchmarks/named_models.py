"""Models of a benchmark, named by [LABEL=]PATH on the command line."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import kvcat
from kvcat.cache import fingerprint
from kvcat.errors import InputError
from kvcat.files import read_json, read_jsonl, write_json
from kvcat.models import load_tokenizer


@dataclass(frozen=True)
class NamedModel:
    """A model with the name that reports give it."""

    label: str
    path: str

    @classmethod
    def parse(cls, text: str) -> "NamedModel":
        """A model from [LABEL=]PATH; without a label it has the name of the file or folder."""
        label, equals, path = text.partition("=")
        if not equals:
            return cls(Path(text).name or text, text)
        if not (label and path):
            raise InputError(f"{text!r} is no model: it reads PATH or LABEL=PATH")
        return cls(label, path)

    @cached_property
    def tokenizer(self) -> Any:
        """Loaded without the weights."""
        return load_tokenizer(self.path)

    def records(self, file: Path) -> list[dict[str, Any]]:
        """This model's records in a file, which need not exist yet.

        Raises:
            InputError: records that name no model.
        """
        everything = read_jsonl(file) if file.exists() else []
        if any("model" not in record for record in everything):
            raise InputError(f"{file} has records that name no model: choose another --out")
        return [record for record in everything if record["model"] == self.label]

    def load(self, device: str = "cpu", dtype: str = "float32") -> Any:
        """The model; its tokenizer is ``tokenizer``."""
        return kvcat.load(self.path, device=device, dtype=dtype)[0]

    def load_for(self, file: Path, dtype: str = "float32") -> Any:
        """The model, to add records to a file; ``FILE.models.json`` identifies its models by label.

        Raises:
            InputError: the file has another model's records under this label.
        """
        model = self.load(dtype=dtype)
        listed = file.with_name(f"{file.name}.models.json")
        fingerprints = read_json(listed) if listed.exists() else {}
        if fingerprints.setdefault(self.label, fingerprint(model)) != fingerprint(model):
            raise InputError(
                f"{file} has records of another model called {self.label!r}: choose another label "
                "or another --out"
            )
        write_json(listed, fingerprints)
        return model


def add_model_option(parser: ArgumentParser) -> None:
    """The option that names models."""
    parser.add_argument(
        "--model",
        nargs="+",
        default=["smollm2-135m"],
        metavar="[LABEL=]PATH",
        help="models, each measured on the same texts",
    )


def add_record_options(parser: ArgumentParser, *, required: bool = True) -> None:
    """The options of a benchmark that asks models and writes their answers to a file."""
    add_model_option(parser)
    parser.add_argument("--out", type=Path, required=required, help="file of records")
    parser.add_argument("--threads", type=int, default=1)


def for_each_model(options: Namespace, measure: Callable[["NamedModel", Namespace], None]) -> None:
    """Measure every model of the options of ``add_record_options``."""
    torch.set_num_threads(options.threads)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for named in parse_models(options.model):
        measure(named, options)


def parse_models(texts: list[str]) -> list[NamedModel]:
    """The models of ``--model``.

    Raises:
        InputError: two models share a label.
    """
    models = [NamedModel.parse(text) for text in texts]
    labels = [model.label for model in models]
    if len(set(labels)) < len(labels):
        raise InputError(f"two models share a label: {', '.join(labels)}")
    return models
