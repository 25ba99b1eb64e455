"""Folders of small texts in every form that streams read, and a stream as documents (no test)."""

import gzip
import json

import pyarrow
import pyarrow.parquet

from kvcat.data import split_of
from tiny import sentences


def texts(count, seed=0, first=0):
    """Documents by id, each unlike the others, of a few words."""
    return {
        f"doc-{i}": f"{i}: " + "".join(sentences(1 + i % 3, seed=seed + i))
        for i in range(first, first + count)
    }


def write_table(path, documents, rows_a_group=1000):
    columns = {"text": list(documents.values()), "id": list(documents)}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_a_group)


def write_lines(path, documents):
    lines = "".join(
        json.dumps({"id": name, "text": text}) + "\n" for name, text in documents.items()
    ).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def write_corpus(folder, kind, num_files=3, a_file=40):
    """Files of one kind below a folder; returns all documents by id."""
    folder.mkdir(parents=True)
    everything = {}
    for number in range(num_files):
        file_texts = texts(a_file, first=number * a_file)
        if kind == "lines":
            write_lines(folder / f"{number}.jsonl", file_texts)
        elif kind == "packed lines":
            write_lines(folder / f"{number}.jsonl.gz", file_texts)
        else:
            write_table(folder / f"{number}.parquet", file_texts, 4 if kind == "groups" else 1000)
        everything |= file_texts
    return everything


def of_split(documents, split):
    return {name: text for name, text in documents.items() if split_of(name) == split}


def documents_in(tokens, tokenizer):
    """The texts between EOS tokens; the last one must be whole."""
    documents = []
    current = []
    for token in tokens:
        if token == tokenizer.eos_token_id:
            documents.append(tokenizer.decode(current))
            current = []
        else:
            current.append(token)
    assert not current, "a document without its EOS"
    return documents
