"""Windows of texts of several kinds, the same text for every model.

A source is KIND=PATH[:SPLIT]. PATH is a folder of text files (any suffix; one document a file), of
JSONL and Parquet tables (one document a row), such a file itself, "installed" or "hub:NAME".
Windows are chosen by a seed. Kinds take turns, and within a kind documents do, so that the first n
windows are a fair sample.

Validation is apart from test by document: a hash of its kind and name puts each document in one
half or the other, whatever the seed.
"""

import hashlib
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
from transformers import PreTrainedTokenizerBase

from kvcat.data import open_documents, split_documents
from kvcat.errors import InputError
from kvcat.files import append_jsonl, claim_folder, read_jsonl
from kvcat.text.encoder import TextEncoder, opening_ids

HALVES = ("all", "validation", "test")
TABLES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.bz2", ".jsonl.xz")
# characters of a window per token: more than any text needs on average
CHARACTERS = 8
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Source:
    """Documents of one kind of text.

    Args:
        kind: of the text, such as "chat".
        path: as in the module's text.
        split: "train", "validation" or "test" of kvcat's training data; "all" for other texts.
    """

    kind: str
    path: str
    split: str = "all"

    @classmethod
    def parse(cls, text: str) -> "Source":
        """A source from KIND=PATH[:SPLIT]."""
        kind, equals, place = text.partition("=")
        if not (kind and equals and place):
            raise InputError(f"{text!r} is no source: it reads KIND=PATH or KIND=PATH:SPLIT")
        path, colon, split = place.rpartition(":")
        if not colon or split not in ("all", "train", "validation", "test"):
            return cls(kind, place)
        return cls(kind, path, split)

    def documents(self, limit: int) -> Iterator[tuple[str, str]]:
        """Names and texts; at most ``limit`` of a Hub data set."""
        path = Path(self.path)
        is_local = path.exists() and self.path != "installed"
        if self.split != "all" or not is_local:
            for document in split_documents(self.path, self.split, limit=limit):
                yield document.id, document.text
            return
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
        for file in files:
            name = file.name if path.is_file() else file.relative_to(path).as_posix()
            if file.name.endswith(TABLES):
                for document in open_documents(str(file)):
                    yield f"{name}:{document.id}", document.text
                continue
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                if path.is_file():
                    raise InputError(f"{file} is no UTF-8 text") from None
                continue  # a picture in a folder of texts
            yield name, text


@dataclass(frozen=True)
class Window:
    """A stretch of a document.

    Args:
        kind, document: of the text; the document's name begins with its kind.
        start: of the stretch in the document, characters.
        text: more than the tokens of a window need.
    """

    kind: str
    document: str
    start: int
    text: str

    def tokens(self, encode: Encode, length: int) -> list[int]:
        """The first ``length`` tokens of the stretch."""
        tokens = encode(self.text)[:length]
        if len(tokens) < length:
            raise InputError(
                f"the window at character {self.start} of {self.document} has {len(tokens)} of "
                f"{length} tokens on this model: choose windows again, with all models"
            )
        return tokens


def encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """Token ids of a text that stands alone.

    It begins as the tokenizer begins a text (BOS, for many tokenizers). Control tokens that a text
    spells are text.
    """
    opening = opening_ids(tokenizer)
    encode = TextEncoder(tokenizer)
    return lambda text: [*opening, *encode(text)]


def long_texts(path: Path, num_characters: int, least: int) -> list[str]:
    """The texts of a Parquet table with more characters than that, in the order of their ids.

    Raises:
        InputError: no such table, or fewer such texts than ``least``.
    """
    try:
        table = pd.read_parquet(path, columns=["id", "text"])
    except (OSError, ValueError) as error:
        line = str(error).partition("\n")[0]
        raise InputError(
            f"{path} is no Parquet table with the columns id and text: {line}"
        ) from None
    texts = [text for text in table.sort_values("id")["text"] if len(text) > num_characters]
    if len(texts) < least:
        raise InputError(
            f"{path} has {len(texts)} texts of more than {num_characters:,} characters; "
            f"{least} are needed"
        )
    return texts


def half_of(document: str) -> str:
    """The half that a document is in, by a hash of its name."""
    return HALVES[1 + hashlib.sha256(f"half:{document}".encode()).digest()[0] % 2]


def choose(
    sources: Sequence[Source],
    encoders: Sequence[Encode],
    *,
    length: int,
    num_windows: int,
    per_document: int = 1,
    half: str = "all",
    seed: int = 0,
) -> list[Window]:
    """Windows that do not overlap, kinds in turns.

    Args:
        sources: of the texts.
        encoders: of the models, each of which has ``length`` tokens in every window.
        length: tokens of a window.
        num_windows: of each kind at most.
        per_document: windows of a document at most.
        half: "validation" or "test" takes the documents of that half alone.
        seed: of the documents' order and of the places in them.

    Raises:
        InputError: a kind without a window, or one that is named twice.
    """
    kinds = [source.kind for source in sources]
    if len(set(kinds)) < len(kinds):
        raise InputError(f"every kind of text is named once, not {', '.join(kinds)}")
    by_kind = [
        _of_source(source, encoders, length, num_windows, per_document, half, seed)
        for source in sources
    ]
    turns = range(max(map(len, by_kind)))
    return [windows[turn] for turn in turns for windows in by_kind if turn < len(windows)]


def _of_source(
    source: Source,
    encoders: Sequence[Encode],
    length: int,
    num_windows: int,
    per_document: int,
    half: str,
    seed: int,
) -> list[Window]:
    """Windows of one kind: the first of every document before the second of any."""
    draw = random.Random(f"{seed}:{source.kind}")
    documents = [
        (f"{source.kind}:{name}", text) for name, text in source.documents(20 * num_windows)
    ]
    documents = [each for each in documents if half in ("all", half_of(each[0]))]
    documents.sort()
    draw.shuffle(documents)
    by_document: list[list[Window]] = []
    for name, text in documents:
        windows = list(_of_document(source.kind, name, text, encoders, length, per_document, draw))
        by_document += [windows] if windows else []
        if len(by_document) == num_windows:
            break
    if not by_document:
        raise InputError(
            f"none of {len(documents)} documents of {source.kind} ({half}) has {length} tokens"
        )
    in_turns = [
        windows[rank]
        for rank in range(per_document)
        for windows in by_document
        if rank < len(windows)
    ]
    return in_turns[:num_windows]


def _of_document(
    kind: str,
    name: str,
    text: str,
    encoders: Sequence[Encode],
    length: int,
    per_document: int,
    draw: random.Random,
) -> Iterator[Window]:
    """At most one window in each of ``per_document`` equal parts of a document."""
    size = CHARACTERS * length
    part_size = max(1, -(-len(text) // per_document))
    for begin in range(0, len(text), part_size):
        end = min(begin + part_size, len(text))
        start = draw.randint(begin, max(begin, end - size))
        window = Window(kind, name, start, text[start : min(start + size, end)])
        if all(len(encode(window.text)) >= length for encode in encoders):
            yield window


def add_options(parser: ArgumentParser, *, required: bool = True) -> None:
    """The options that choose windows."""
    parser.add_argument(
        "--data", nargs="+", required=required, default=[], metavar="KIND=PATH[:SPLIT]"
    )
    parser.add_argument("--prefix", type=int, default=768)
    parser.add_argument("--windows", type=int, default=16, help="of each kind")
    parser.add_argument("--per-document", type=int, default=2)
    parser.add_argument("--half", choices=HALVES, default="all", help="of the documents")
    parser.add_argument("--seed", type=int, default=0, help="of the windows' places")


def stored(out: Path, options: Namespace, suffix: int, encoders: Sequence[Encode]) -> list[Window]:
    """The windows of an output folder, chosen and written there if it has none.

    Raises:
        InputError: the folder holds windows of other options.
    """
    names = ("data", "prefix", "windows", "per_document", "half", "seed")
    settings = {name: getattr(options, name) for name in names}
    out.mkdir(parents=True, exist_ok=True)
    if claim_folder(out, "config.json", settings) not in (None, settings):
        raise InputError(f"{out} holds other windows: see its config.json")
    path = out / "windows.jsonl"
    if not path.exists():
        windows = choose(
            [Source.parse(text) for text in options.data],
            encoders,
            length=options.prefix + suffix,
            num_windows=options.windows,
            per_document=options.per_document,
            half=options.half,
            seed=options.seed,
        )
        append_jsonl(path, *(asdict(window) for window in windows))
    return [Window(**record) for record in read_jsonl(path)]
