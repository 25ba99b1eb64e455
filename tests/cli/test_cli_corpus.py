"""corpus, info, generate and chat with a store, from the command line."""

import io
import json
import os
import select
import signal
import subprocess
import sys
import time

import pytest

from kvcat.cli.app import run
from kvcat.corpus import Store
from kvcat.models import load_tokenizer
from tiny import sentences, write_tiny_model


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Three documents, one of them empty."""
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    texts = ["".join(sentences(2, seed=1)), "".join(sentences(2, seed=2)), ""]
    rows = [json.dumps({"id": f"a/{number}", "text": text}) for number, text in enumerate(texts)]
    file.write_text("\n".join(rows) + "\n")
    return file


@pytest.fixture(scope="module")
def store(tiny_folder, corpus):
    """Its store, in a chat template."""
    folder = corpus.parent / "store"
    options = ["--keep", "0.5", "--chat", "-o", folder]
    assert kvcat("corpus", tiny_folder, corpus, *options) == 2  # one has no cache
    return folder


def kvcat(*words):
    return run([str(word) for word in words])


def test_a_corpus_is_compressed_described_and_continued(tiny_folder, corpus, store, capsys):
    assert Store(store).ids == ("a/0", "a/1")
    assert kvcat("info", store) == 0
    shown = capsys.readouterr().out
    assert "2 caches, 1 documents without one" in shown
    assert "the document is empty" in shown
    assert kvcat("info", store, "--id", "a/1") == 0
    assert "id a/1" in capsys.readouterr().out
    words = ["corpus", tiny_folder, corpus, "--keep", "0.5", "--chat", "-o", store]
    assert kvcat(*words) == 2
    said = capsys.readouterr()
    assert "0 caches made and 2 kept of 3 documents, 1 without a cache" in said.out
    assert "no cache of 'a/2': the document is empty" in said.err
    assert said.err.endswith(f"1 of 3 documents have no cache: `kvcat info {store}`\n")
    assert kvcat("info", store, "--json") == 0
    assert json.loads(capsys.readouterr().out)["store"] == "2 caches, 1 documents without one"


def test_ids_of_any_characters_are_described_on_one_line(tiny_folder, tmp_path, capsys):
    ids = ["a\n\x1b[31mb", "x" * 9000]
    rows = [json.dumps({"id": id, "text": "the cat sat"}) for id in ids]
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows))
    store = tmp_path / "store"
    assert kvcat("corpus", tiny_folder, tmp_path / "corpus.jsonl", "-o", store) == 0
    capsys.readouterr()
    for id in ids:
        assert kvcat("info", store, f"--id={id}") == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 7
        assert all(line.isprintable() and len(line) < 1000 for line in lines)


def test_generate_prints_json_and_ends_at_a_stop_text(tiny_folder, store, capsys):
    words = ["generate", tiny_folder, "--store", store, "--id", "a/0", "--max-new-tokens", 8]
    words += ["--prompt", "the cat", "--prompt", "the dog", "--json"]
    assert kvcat(*words) == 0
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (first["prompt"], second["prompt"]) == ("the cat", "the dog")
    assert first["finish_reason"] == "length"
    assert first["answer_tokens"] == 8
    assert first["document_tokens"] == Store(store).row("a/0").tokens
    stop = first["answer"][2:4]
    assert kvcat(*words, "--stop", stop) == 0
    stopped = json.loads(capsys.readouterr().out.splitlines()[0])
    assert stopped["answer"] == first["answer"][: first["answer"].index(stop)]
    assert stopped["finish_reason"] == "stop"


def test_chat_answers_line_by_line_and_saves_the_conversation(
    tiny_folder, store, tmp_path, capsys, monkeypatch
):
    saved = tmp_path / "talk.json"
    other = tmp_path / "other.json"
    other.touch()
    lines = f"the cat\n\n/nonsense\n/save {saved}\nthe dog\n/save {other}\n/save {saved}\n"
    lines += f"/reset\nthe cat\n/save {saved}\n/save {tmp_path / 'again.json'}\n/quit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    words = ["chat", tiny_folder, "--store", store, "--id", "a/1", "--max-new-tokens", 5]
    assert kvcat(*words) == 2  # what comes from a file is no conversation in which one sees errors
    said = capsys.readouterr()
    assert "/nonsense is not a command" in said.err
    assert f"{other} exists: name a new file" in said.err
    assert f"{saved} exists: name a new file" in said.err  # the conversation before /reset
    assert said.err.endswith("kvcat: lines of the input that failed, with the reasons above: 3\n")
    assert other.read_bytes() == b""
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[0]["content"] == "the cat"
    again = json.loads((tmp_path / "again.json").read_text())["messages"]
    assert again == messages[:2]
    assert said.out.startswith(messages[1]["content"] + "\n")


@pytest.mark.parametrize("name", ["n" * 300, "a\0b", "~no user\0", "folder"])
def test_a_conversation_that_cannot_be_saved_to_a_name_goes_on(
    name, tiny_folder, store, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"the cat\n/save {name}\n/save talk.json\n"))
    words = ["chat", tiny_folder, "--store", store, "--id", "a/1", "--max-new-tokens", 5]
    assert kvcat(*words) == 2
    assert ("exists" if name == "folder" else "cannot write ") in capsys.readouterr().err
    assert len(json.loads((tmp_path / "talk.json").read_text())["messages"]) == 2


def test_questions_from_a_file_of_another_system_are_those_of_their_lines(
    tiny_folder, store, tmp_path, capsys, monkeypatch
):
    """It may begin with a byte order mark, and its lines may end with a carriage return."""
    words = ["chat", tiny_folder, "--store", store, "--id", "a/1", "--max-new-tokens", 5]
    shown = []
    for start, end in (("", "\n"), ("\ufeff", "\r\n")):
        saved = tmp_path / f"{len(shown)}.json"
        lines = ["the cat", "the dog", "", f"/save {saved}", "/quit", "never"]
        monkeypatch.setattr("sys.stdin", io.StringIO(start + "".join(f"{x}{end}" for x in lines)))
        assert kvcat(*words) == 0
        shown.append((capsys.readouterr().out, json.loads(saved.read_text())))
    assert shown[0] == shown[1]
    assert [turn["content"] for turn in shown[0][1]["messages"][::2]] == ["the cat", "the dog"]


@pytest.mark.slow
def test_chat_compresses_older_turns_and_goes_on(tmp_path, capsys, monkeypatch):
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=8192)
    (tmp_path / "text.txt").write_text("".join(sentences(2)))
    cache = tmp_path / "cache.safetensors"
    assert kvcat("compress", model, "--text", tmp_path / "text.txt", "-o", cache) == 0
    long_question = "the old cat sees a small red stone and " * 420
    assert len(load_tokenizer(model)(long_question).input_ids) > 4096
    lines = f"the cat\n{long_question}\nthe dog\n/save {tmp_path / 'talk.json'}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert kvcat("chat", model, "--cache", cache, "--max-new-tokens", 5) == 0
    assert capsys.readouterr().err.count("the older turns were compressed") == 1
    assert len(json.loads((tmp_path / "talk.json").read_text())["messages"]) == 6


def read_until(terminal, wanted, seconds=120):
    """What a terminal shows until a text occurs in it."""
    shown = ""
    deadline = time.monotonic() + seconds
    while wanted not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"no {wanted!r} in {shown!r}"
        shown += os.read(terminal, 4096).decode()
    return shown


def interrupted(command, terminal):
    """What a terminal shows from Ctrl-C to the next prompt."""
    shown = ""
    for _ in range(60):
        # between the prompt and Python's read of the line, and where Python frees an object, a
        # signal is lost: then a person presses again
        command.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 0.1)[0]:
                continue
            shown += os.read(terminal, 4096).decode()
            if "\r\n> " in shown:
                return shown
    return shown


@pytest.mark.slow
def test_chat_in_a_terminal_streams_stops_at_ctrl_c_and_ends_at_ctrl_d(tmp_path):
    pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
    # no answer of this length ends before the signal comes
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=4096)
    text = tmp_path / "text.txt"
    text.write_text("".join(sentences(2)))
    cache = tmp_path / "cache.safetensors"
    assert kvcat("compress", model, "--text", text, "--keep", "0.5", "-o", cache) == 0
    terminal, end = pty.openpty()
    words = ["chat", model, "--cache", cache, "--max-new-tokens", 3000]
    command = subprocess.Popen(
        [sys.executable, "-m", "kvcat", *map(str, words)],
        stdin=end,
        stdout=end,
        stderr=end,
    )
    os.close(end)
    assert "tokens of document" in read_until(terminal, "> ")
    os.write(terminal, b"the dog\n")
    if read_until(terminal, "the dog\r\n").endswith("the dog\r\n"):
        os.read(terminal, 1)  # the answer has begun
    assert "stopped: this question" in interrupted(command, terminal)
    interrupted(command, terminal)  # at the prompt, where it drops the line
    os.write(terminal, b"\x04")  # Ctrl-D
    assert command.wait(60) == 0
    os.close(terminal)


def test_ray_that_is_not_installed_is_one_line_before_the_model_is_loaded(
    tiny_folder, corpus, tmp_path, mistake, monkeypatch
):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "kvcat.ray_cluster", raising=False)
    monkeypatch.setattr("kvcat.models.load", None)
    out = tmp_path / "out"
    words = ["corpus", tiny_folder, corpus, "-o", out, "--ray", "auto"]
    assert "--ray needs Ray: pip install" in mistake(*words)
    assert not out.exists()


def test_a_store_of_other_settings_is_rejected_before_the_model_is_loaded(
    tiny_folder, corpus, store, mistake, monkeypatch
):
    monkeypatch.setattr("kvcat.models.load", None)
    message = mistake("corpus", tiny_folder, corpus, "--chat", "-o", store)
    assert "was made with keep_ratio 0.5, not 0.2" in message


def test_a_run_without_a_single_cache_ends_with_an_error(tiny_folder, tmp_path, capsys):
    file = tmp_path / "corpus.jsonl"
    file.write_text(json.dumps({"id": "long", "text": "".join(sentences(60))}) + "\n")
    store = tmp_path / "my store"
    assert kvcat("corpus", tiny_folder, file, "-o", store) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"kvcat: 1 of 1 documents have no cache: `kvcat info '{store}'`"
    assert "tokens, and the model 256 positions" in Store(store).rows[0].error


def test_each_of_many_failed_documents_is_shown_and_how_many_others_there_are(
    tiny_folder, tmp_path, capsys
):
    ids = [f"archive/2024/quarterly-reports/department-{number}" for number in range(7)]
    rows = [json.dumps({"id": id, "text": ""}) for id in ids]
    rows.append('{"id": "fine", "text": "the cat"}')
    (tmp_path / "c.jsonl").write_text("\n".join(rows))
    assert kvcat("corpus", tiny_folder, tmp_path / "c.jsonl", "-o", tmp_path / "s") == 2
    capsys.readouterr()
    assert kvcat("info", tmp_path / "s", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [id for id in ids if any(repr(id) in str(fact) for fact in shown.values())] == ids[:5]
    assert shown["without"] == "2 others: see the manifest"


def test_a_cache_of_another_number_type_says_so(tiny_folder, store, mistake):
    words = [tiny_folder, "--store", store, "--id", "a/0", "--prompt", "x"]
    shown = mistake("generate", *words, "--dtype", "bfloat16")
    assert shown.strip().endswith("the cache is in float32, and this model in bfloat16")


def test_a_cache_of_a_chat_is_not_that_of_another_model(store, mistake):
    words = ["kvcat-base", "--store", store, "--id", "a/0"]
    message = "a/0 belongs to another model: it was made with tiny (fingerprint "
    for command in (["generate", *words, "--prompt", "x"], ["chat", *words]):
        shown = mistake(*command)
        assert message in shown
        assert "kvcat-base" in shown


def test_options_that_name_no_cache_or_two_are_rejected(tiny_folder, store, mistake):
    words = ["generate", tiny_folder, "--prompt", "x"]
    assert "no cache: give --cache FILE" in mistake(*words)
    assert "give either --cache" in mistake(*words, "--cache", "x", "--store", store)
    assert "belong together" in mistake(*words, "--store", store)
    assert "no document 'b'" in mistake(*words, "--store", store, "--id", "b")
    assert "has no cache: the document is empty" in mistake(
        "chat", tiny_folder, "--store", store, "--id", "a/2"
    )
    assert "no store of caches" in mistake("serve", tiny_folder, "--store", store.parent)
    assert "--port takes 1<=PORT<=65535, not 70000" in mistake(
        "serve", tiny_folder, "--store", store, "--port", 70000
    )
