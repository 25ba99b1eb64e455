"""Documents in bounded memory: each piece is compressed before the next one is read."""

from dataclasses import replace

import pytest
import torch

import kvcat
from kvcat.cache import CompactCache
from kvcat.compress import AttentionMatching, Reconstruction, parts, pieces, replay, trace
from kvcat.compress.pieces import compress_in_pieces
from tiny import byte_tokenizer, loud_model, refusal, sentences

PIECE = 16
INSTRUCTION = 5


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_TOKENS", PIECE)


def sequence_of(ids, instruction, first=0):
    """A text, and its tokens from the first one on repeated after the instruction."""
    repeated = torch.cat([ids, instruction, ids[:, first:]], dim=1)
    return Reconstruction(repeated, ids.shape[1], ids.shape[1] + instruction.shape[1])


@pytest.fixture(scope="session")
def text(windows):
    """48 tokens: three pieces."""
    return windows[:1, :48]


@pytest.fixture(scope="session")
def instruction(windows):
    return windows[:1, 59:64]


class KeepsFirstPiece(AttentionMatching):
    """All slots of the piece that follows nothing; later ones are compressed."""

    def __call__(self, traced, **size):
        return traced.dense_cache() if traced.document is None else super().__call__(traced, **size)


def check_begins_with(cache, first):
    """The slots of the second cache are the first ones of every head, or all, of the other."""
    for ours, theirs in zip(cache.layers, first.layers, strict=True):
        for our_head, their_head in zip(ours.heads()[0], theirs.heads()[0], strict=True):
            kept = our_head.kept(slice(len(their_head)))
            torch.testing.assert_close(kept.keys, their_head.keys)
            torch.testing.assert_close(kept.values, their_head.values)
            torch.testing.assert_close(kept.bias_or_zeros(), their_head.bias_or_zeros())


def test_all_slots_give_the_logits_of_a_stock_forward(double, windows, text, instruction):
    cache = compress_in_pieces(double, sequence_of(text, instruction), AttentionMatching(), 48)
    assert (cache.num_tokens, cache.num_slots) == (48, 48)
    later = windows[:1, 48:]
    logits = double(windows[:1]).logits[:, 48:]
    torch.testing.assert_close(replay(double, cache, later), logits, rtol=0, atol=1e-10)


def test_the_first_piece_is_compressed_as_a_document_of_its_own(double, text, instruction):
    cache = compress_in_pieces(double, sequence_of(text, instruction), AttentionMatching(), 15)
    alone = trace(double, sequence_of(text[:, :PIECE], instruction))
    first = AttentionMatching()(alone, num_slots=5)
    check_begins_with(cache, first)


def test_a_later_piece_is_compressed_as_in_a_text_whose_earlier_tokens_stay(
    double, text, instruction
):
    """Fitted to its repetition alone, so that both have the same queries."""
    both = text[:, : 2 * PIECE]
    method = KeepsFirstPiece(own_weight=0.0)
    cache = compress_in_pieces(double, sequence_of(both, instruction), method, num_slots=14)
    whole = trace(double, sequence_of(both, instruction, first=PIECE))
    stay = AttentionMatching(own_weight=0.0)(whole, num_slots=PIECE + 7, protect=[(0, PIECE)])
    assert cache.num_slots == stay.num_slots
    check_begins_with(cache, stay)


def test_what_follows_does_not_change_the_slots_before_it(double, text, instruction):
    sizes = ((2 * PIECE, 10), (3 * PIECE, 15))
    shorter, longer = (
        compress_in_pieces(
            double, sequence_of(text[:, :tokens], instruction), AttentionMatching(), slots
        )
        for tokens, slots in sizes
    )
    assert (shorter.mean_slots, longer.mean_slots) == (10, 15)
    check_begins_with(longer, shorter)


def test_pieces_share_a_number_of_slots_that_they_do_not_divide(double, windows, instruction):
    sequence = sequence_of(windows[:1, :47], instruction)
    seen = []
    cache = compress_in_pieces(
        double, sequence, AttentionMatching(), 10, lambda traced, _: seen.append(traced.prefix_len)
    )
    assert seen == [15, 16, 16]
    assert (cache.num_tokens, cache.mean_slots) == (47, 10)
    # the shortest piece has 15 of the 47 tokens
    least = compress_in_pieces(double, sequence, AttentionMatching(), 4)
    assert least.mean_slots == 4
    message = refusal(compress_in_pieces, double, sequence, AttentionMatching(), 3)
    assert "num_slots is 3: 3 pieces need at least 4" in message


def test_the_tokens_that_open_a_text_are_not_repeated(double, text, instruction):
    """As in a document of one piece."""
    sequence = sequence_of(text, instruction, first=2)
    cache = compress_in_pieces(double, sequence, AttentionMatching(), 15)
    alone = trace(double, sequence_of(text[:, :PIECE], instruction, first=2))
    first = AttentionMatching()(alone, num_slots=5)
    check_begins_with(cache, first)


def test_a_text_that_leaves_no_room_to_repeat_a_piece_is_rejected(instruction, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_TOKENS", 128)
    monkeypatch.setattr(parts, "PART_TOKENS", 64)
    ids = torch.randint(1, 67, (1, 256), generator=torch.Generator().manual_seed(2))
    sequence = sequence_of(ids, instruction, first=40)
    for positions in (300, 340):
        model = loud_model(max_position_embeddings=positions)
        message = refusal(compress_in_pieces, model, sequence, AttentionMatching(), 50)
        assert "too few for it and" in message
    model = loud_model(max_position_embeddings=341)  # 64 for a part of the last piece
    assert compress_in_pieces(model, sequence, AttentionMatching(), 50).num_tokens == 256


@pytest.fixture(scope="module")
def document():
    tokenizer = byte_tokenizer()
    model = loud_model(vocab_size=len(tokenizer), max_position_embeddings=512)
    return model, tokenizer, "".join(sentences(2, seed=5))


CHATML = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("chat", [False, True])
def test_the_file_says_what_that_of_the_whole_document_says(document, tmp_path, chat):
    made = {}
    document[1].chat_template = CHATML
    for in_pieces in (False, True):
        settings = kvcat.DocumentSettings(keep_ratio=0.5, in_pieces=in_pieces, chat=chat)
        kvcat.compress_document(*document, settings).save(tmp_path / "c")
        made[in_pieces] = CompactCache.load(tmp_path / "c")
    whole, ours = made[False], made[True]
    assert ours.num_tokens == whole.num_tokens > PIECE
    assert ours.bits == whole.bits == 8
    assert ours.nbytes == pytest.approx(whole.nbytes, rel=0.05)
    assert len(ours.record.first_slots[0]) == len(whole.record.first_slots[0])
    assert replace(ours.record, first_slots=()) == replace(whole.record, first_slots=())
    if not chat:
        assert kvcat.compose(document[0], [whole, ours]).num_tokens == 2 * whole.num_tokens


def test_a_text_of_one_piece_has_the_cache_that_it_has_otherwise(document, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_TOKENS", 1024)
    caches = [
        kvcat.compress_document(*document, kvcat.DocumentSettings(in_pieces=in_pieces))
        for in_pieces in (False, True)
    ]
    for ours, theirs in zip(*(cache.layers for cache in caches), strict=True):
        for name, tensor in ours.tensors().items():
            assert torch.equal(tensor, theirs.tensors()[name])


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("in_pieces and max_kl", {"max_kl": 0.1}),
        ("in_pieces and max_megabytes", {"max_megabytes": 1.0}),
        ("in_pieces and passages to protect", {"passages": ("cat",)}),
        ("in_pieces and supervision self", {"supervision": "self"}),
        ("snapkv fits no slots to a repetition", {"method": "snapkv"}),
        ("4 bits are too few", {"bits": "4"}),
        ("4 bits are too few", {"method": "attention-matching,bits=4"}),
    ],
)
def test_what_needs_the_whole_document_is_rejected(document, message, settings):
    def compressed():
        kvcat.compress_document(*document, kvcat.DocumentSettings(in_pieces=True, **settings))

    assert message in refusal(compressed)


def test_a_model_with_windows_is_rejected(text, instruction):
    windowed = loud_model("mistral", sliding_window=20)
    message = refusal(
        compress_in_pieces, windowed, sequence_of(text, instruction), AttentionMatching(), 9
    )
    assert "sliding windows" in message
