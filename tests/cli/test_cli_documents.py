"""compress, then generate: a document compressed once answers again and again."""

import io
import shutil

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvcat
from kvcat.cli.app import run
from kvcat.compress.documents import chat_parts, document_trace, question_ids
from tiny import sentences, write_tiny_model

DOCUMENT = "".join(sentences(4, seed=7))


@pytest.fixture(scope="module")
def model(tiny_folder):
    return kvcat.load(tiny_folder)


@pytest.fixture
def document(tmp_path):
    (tmp_path / "doc.txt").write_text(DOCUMENT)
    return tmp_path / "doc.txt"


def compress(folder, document, *options):
    output = document.parent / "doc.safetensors"
    argv = ["compress", folder, "--text", document, "-o", output, *options]
    assert run([str(x) for x in argv]) == 0
    return output


def generate(folder, cache, *options):
    return run([str(x) for x in ["generate", folder, "--cache", cache, "--max-new-tokens", 8, *options]])


def mistake(capsys, code):
    said = capsys.readouterr()
    assert code == 2
    assert len(said.err.splitlines()) == 1
    return said.err


def stock_answer(folder, text, tokens=8):
    """What unmodified transformers answers without a cache."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    stock = AutoModelForCausalLM.from_pretrained(folder)
    out = stock.generate(**ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True)


def test_keep_one_answers_as_the_model_does_without_a_cache(tiny_folder, document, capsys):
    cache = compress(tiny_folder, document, "--keep", 1)
    capsys.readouterr()
    assert generate(tiny_folder, cache, "--prompt", "the cat") == 0
    assert capsys.readouterr().out == stock_answer(tiny_folder, DOCUMENT + "the cat") + "\n"


def test_a_cache_says_what_it_holds_and_how_it_was_made(tiny_folder, document, capsys):
    cache = compress(tiny_folder, document, "--keep", 0.25, "--method", "snapkv")
    said = capsys.readouterr()
    loaded = kvcat.CompactCache.load(cache)
    assert said.err == ""
    assert said.out.startswith(f"{cache}: {loaded.num_tokens} tokens in {loaded.num_slots} slots")
    facts = {"method": "snapkv", "supervision": "reconstruction", "chat": "no", "dtype": "float32"}
    assert facts.items() <= loaded.metadata.items()
    assert loaded.num_slots == -(-loaded.num_tokens // 4)


@pytest.mark.parametrize("method", ["attention-matching", "first", "random", "keynorm", "snapkv", "h2o"])
def test_every_method_makes_a_cache_that_answers(method, tiny_folder, document, capsys):
    for seed in (0, 0):
        cache = compress(tiny_folder, document, "--keep", 0.2, "--method", method, "--seed", seed, "--overwrite")
        assert generate(tiny_folder, cache, "--prompt", "the cat") == 0
    first, _, second = capsys.readouterr().out.partition(f"{cache}: ")[2].partition(f"{cache}: ")
    assert first == second


def test_several_prompts_each_start_from_the_document_alone(tiny_folder, document, capsys):
    cache = compress(tiny_folder, document, "--keep", 0.3)
    capsys.readouterr()
    alone = []
    for prompt in ("the cat", "a dog sees"):
        generate(tiny_folder, cache, "--prompt", prompt)
        alone.append(capsys.readouterr().out)
    generate(tiny_folder, cache, "--prompt", "the cat", "--prompt", "a dog sees")
    assert capsys.readouterr().out == f"> the cat\n{alone[0]}> a dog sees\n{alone[1]}"


def test_prompts_are_read_from_standard_input_up_to_an_empty_line(tiny_folder, document, capsys, monkeypatch):
    cache = compress(tiny_folder, document, "--keep", 0.3)
    capsys.readouterr()
    generate(tiny_folder, cache, "--prompt", "the cat")
    one = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\nthe cat\n\nthe dog\n"))
    assert generate(tiny_folder, cache) == 0
    assert capsys.readouterr().out == one + one


def test_no_prompt_at_all_is_a_mistake(tiny_folder, document, capsys, monkeypatch):
    cache = compress(tiny_folder, document, "--keep", 0.3)
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "no prompt" in mistake(capsys, generate(tiny_folder, cache))
    assert "the prompt is empty" in mistake(capsys, generate(tiny_folder, cache, "--prompt", ""))


def test_every_prompt_is_checked_before_the_first_is_answered(tiny_folder, document, capsys):
    cache = compress(tiny_folder, document, "--keep", 0.3)
    for bad, told in [("", "the prompt is empty"), (DOCUMENT * 9, "no position is left")]:
        capsys.readouterr()
        assert generate(tiny_folder, cache, "--prompt", "the cat", "--prompt", bad) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert told in said.err


def test_a_text_beyond_the_tokenizers_length_is_one_line_all_the_same(document, tmp_path, capfd):
    folder = write_tiny_model(tmp_path / "strict")
    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=256)
    tokenizer.save_pretrained(folder)
    cache = compress(folder, document, "--keep", 0.3)
    capfd.readouterr()
    assert "no position is left" in mistake(capfd, generate(folder, cache, "--prompt", DOCUMENT * 9))
    document.write_text(DOCUMENT * 9)
    again = ["compress", folder, "--text", document, "-o", tmp_path / "long.safetensors"]
    for extra in ([], ["--chat"]):
        assert "more than the model's 256" in mistake(capfd, run([str(x) for x in [*again, *extra]]))


def test_sampling_is_a_function_of_the_seed(tiny_folder, document, capsys):
    cache = compress(tiny_folder, document, "--keep", 0.3)
    answers = []
    for seed in (1, 1, 2):
        capsys.readouterr()
        generate(tiny_folder, cache, "--prompt", "the cat", "--temperature", 2, "--seed", seed)
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


def test_a_chat_cache_and_its_question_are_the_templates_own_tokens(model):
    loaded, tokenizer = model
    head, between, tail = chat_parts(tokenizer)
    assert (head, between, tail) == ("<user>", "\n\n", "</user><assistant>")
    trace = document_trace(loaded, tokenizer, DOCUMENT, supervision="self", chat=True)
    ids = [*trace.input_ids[0].tolist(), *question_ids(tokenizer, "who sees it", chat=True)[0].tolist()]
    turn = [{"role": "user", "content": f"{DOCUMENT}\n\nwho sees it"}]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)


def test_a_chat_cache_wraps_every_prompt(tiny_folder, document, capsys):
    cache = compress(tiny_folder, document, "--keep", 1, "--chat")
    capsys.readouterr()
    assert generate(tiny_folder, cache, "--prompt", "who sees it") == 0
    wrapped = f"<user>{DOCUMENT}\n\nwho sees it</user><assistant>"
    assert capsys.readouterr().out == stock_answer(tiny_folder, wrapped) + "\n"


def test_chat_without_a_template_is_a_mistake(document, tmp_path, capsys):
    plain = write_tiny_model(tmp_path / "plain", chat=False)
    code = run(["compress", str(plain), "--text", str(document), "-o", str(tmp_path / "c.safetensors"), "--chat"])
    assert "no chat template" in mistake(capsys, code)
    assert not (tmp_path / "c.safetensors").exists()


def test_the_supervision_decides_how_long_a_document_may_be(tiny_folder, tmp_path, capsys):
    document = tmp_path / "doc.txt"
    document.write_text("".join(sentences(9, seed=7)))
    output = tmp_path / "c.safetensors"
    argv = ["compress", str(tiny_folder), "--text", str(document), "-o", str(output)]
    assert "use --supervision self" in mistake(capsys, run(argv))
    assert not output.exists()
    assert run([*argv, "--supervision", "self"]) == 0
    assert kvcat.CompactCache.load(output).metadata["supervision"] == "self"
    document.write_text("".join(sentences(90, seed=7)))
    capsys.readouterr()
    told = mistake(capsys, run([*argv, "--supervision", "self", "--overwrite"]))
    assert "more than the model's 256 positions" in told


def test_an_existing_cache_is_only_replaced_on_request(tiny_folder, document, capsys):
    cache = compress(tiny_folder, document, "--keep", 0.5)
    before = cache.read_bytes()
    capsys.readouterr()
    again = ["compress", str(tiny_folder), "--text", str(document), "-o", str(cache), "--keep", "0.1"]
    assert "--overwrite" in mistake(capsys, run(again))
    assert cache.read_bytes() == before
    assert run([*again, "--overwrite"]) == 0
    assert cache.stat().st_size < len(before)


def test_a_cache_of_another_model_is_a_mistake(tiny_folder, document, tmp_path, capsys):
    cache = compress(tiny_folder, document, "--keep", 0.5)
    other = write_tiny_model(tmp_path / "other", seed=1)
    capsys.readouterr()
    assert "belongs to another model" in mistake(capsys, generate(other, cache, "--prompt", "the cat"))


@pytest.mark.parametrize("where", [0.3, 0.9, 0.999])
def test_a_truncated_cache_is_a_mistake(where, tiny_folder, document, capsys):
    cache = compress(tiny_folder, document, "--keep", 0.5)
    cache.write_bytes(cache.read_bytes()[: int(where * cache.stat().st_size)])
    capsys.readouterr()
    told = mistake(capsys, generate("./no-model-is-loaded-for-this", cache, "--prompt", "the cat"))
    assert "truncated" in told


def test_a_changed_cache_is_a_mistake(tiny_folder, document, capsys):
    cache = compress(tiny_folder, document, "--keep", 0.5)
    content = bytearray(cache.read_bytes())
    content[-5] ^= 1
    cache.write_bytes(content)
    capsys.readouterr()
    assert "checksum" in mistake(capsys, generate(tiny_folder, cache, "--prompt", "the cat"))


def test_another_safetensors_file_is_no_cache(tiny_folder, capsys):
    told = mistake(capsys, generate(tiny_folder, tiny_folder / "model.safetensors", "--prompt", "the cat"))
    assert "not a compact cache" in told


def test_a_cache_of_bfloat16_is_answered_in_bfloat16(tiny_folder, document, capsys):
    cache = compress(tiny_folder, document, "--keep", 0.5, "--dtype", "bfloat16")
    with safe_open(cache, "pt") as file:
        assert file.get_tensor("layers.0.keys").dtype == torch.bfloat16
    assert generate(tiny_folder, cache, "--prompt", "the cat") == 0


def test_answers_end_at_the_models_last_position(tiny_folder, tmp_path, capsys):
    document = tmp_path / "doc.txt"
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    text = "".join(sentences(60, seed=7))
    document.write_text(tokenizer.decode(tokenizer(text)["input_ids"][:250]))
    cache = compress(tiny_folder, document, "--supervision", "self")
    assert generate(tiny_folder, cache, "--prompt", " the") == 0
    capsys.readouterr()
    assert "no position is left" in mistake(capsys, generate(tiny_folder, cache, "--prompt", DOCUMENT))


def test_a_model_without_a_tokenizer_is_a_mistake(tiny_folder, document, tmp_path, capsys):
    bare = shutil.copytree(tiny_folder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    code = run(["compress", str(bare), "--text", str(document), "-o", str(tmp_path / "c.safetensors")])
    assert "no tokenizer" in mistake(capsys, code)
