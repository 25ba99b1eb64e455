"""Sessions: conversations that compress what lies behind them, again and again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import CompactCache, fingerprint
from kvcat.cache.ranges import Range
from kvcat.compress.base import Compressor
from kvcat.compress.compose import append
from kvcat.compress.kept_queries import keep_queries, placed_after
from kvcat.compress.parts import repeated_tokens
from kvcat.compress.prefix import clipped, joined_ranges, protecting
from kvcat.compress.query_set import QuerySet
from kvcat.compress.sessions.budget import budget_in_slots, check_budget
from kvcat.compress.sessions.files import SavedSession, read_session, session_lock, write_session
from kvcat.compress.sessions.generation import SessionRow, check_settings, inputs_after
from kvcat.compress.sessions.inputs import (
    Tokens,
    checked_document,
    checked_method,
    compaction_obstacle,
    token_ids,
)
from kvcat.compress.sessions.read_tokens import ReadTokens
from kvcat.compress.sessions.repetition import fitted_also_to, instruction_ids
from kvcat.compress.sessions.state import SessionState
from kvcat.compress.trace import Trace
from kvcat.errors import InputError, check_least, one_line
from kvcat.generate import (
    Answer,
    AnswerRow,
    AnswerStream,
    Row,
    Sampling,
    TakeText,
    answer_length,
    end_tokens,
    generate,
)
from kvcat.models import check_length, check_supported, logits_from_hidden, positions_of
from kvcat.text.encoder import TextEncoder
from kvcat.text.turns import Turns
from kvcat.types import Float, Int, Tensor

_BUDGET = 4096  # slots after a document; so many tokens are fitted at once without segments
_Kept = Callable[[list[int]], list[int]]


class Session:
    """A conversation in a bounded number of KV slots.

    Tokens are appended once. When they need more slots than ``budget``, all but the last ``tail``
    tokens are compressed with the slots from before, to ``budget - tail - room`` slots. For the fit
    the model repeats the tokens that are compressed now, right after them, as it repeats a
    document. The fit uses the queries of this repetition, the tokens' own, and those of the
    repetition of ``num_kept`` tokens compressed before, in 8 bits, with what they attended to while
    it was exact, so that errors of earlier fits do not add up. Without a repetition (too few
    positions, a tokenizer that cannot ask for it) the queries of the tail take its place, and the
    tokens' own are kept. Slots that were fitted before have a log-bias, which is part of the
    attention that the next fit reproduces for the other queries, so that they count as the tokens
    that they represent. Until the first compaction the logits are those of the dense model.

    All of it may follow a document, a compact cache that was made before. Its slots stay as they
    are: to the fits, what a query gives to them is attention elsewhere.

    Sessions of one process are independent of each other; use a model from one thread at a time.
    The model stays as it is: a call after a change of its weights or settings is rejected, because
    what the session holds is of the model before.

    Args:
        model, tokenizer: of the conversation.
        document: compact cache of the document that everything follows; None: there is none. With
            it a model may have layers that sessions do not compress (sliding windows, recurrent
            states, LongRoPE): then nothing is ever compressed.
        budget: most KV slots per layer and head, on average, that remain after a call, besides
            those of the document. While a piece of text is appended, there are as many more as it
            has tokens. It may be left out with a document: 4096, or all positions of a model for
            which nothing is compressed.
        budget_bytes: the same in bytes of keys, values and log-bias in the model's number type,
            instead of ``budget``. Kept queries come on top (``nbytes``).
        tail: number of last tokens that stay exact, at least 1.
        method: name and options of a compressor, as on the command line, or a ``Compressor``.
            Methods that need all queries of the prefix (snapkv, h2o, tova, presses of kvpress) do
            not compress what is compact already, and are rejected.
        room: slots that are free after a compaction, for the tokens until the next one; None: a
            third of ``budget - tail``.
        num_kept: tokens compressed before whose queries are kept, at least 0.
        piece: most tokens that are appended at once; a longer text is compacted piece by piece.
        protect: ranges (first, end) of tokens after the document whose slots stay exact for ever;
            they count in the budget. ``append(..., protect=True)`` adds ranges.

    Raises:
        InputError: a number out of its range; a budget that is too small for tail, room and
            protected tokens; a method or, without a document, a model that cannot compress again;
            a document of another model, of several examples or in another chat template.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        document: CompactCache | None = None,
        budget: int | None = None,
        budget_bytes: int | None = None,
        tail: int = 64,
        method: str | Compressor = "attention-matching",
        room: int | None = None,
        num_kept: int = 2048,
        piece: int = 1024,
        protect: Sequence[Range] = (),
    ) -> None:
        check_least(1, tail=tail, piece=piece)
        check_least(0, num_kept=num_kept)
        self._compressor = checked_method(method)
        check_supported(model)
        self._obstacle = compaction_obstacle(model.config)
        if self._obstacle and (document is None or budget_bytes is not None):
            raise InputError(self._obstacle)
        positions = positions_of(model.config)
        turns = Turns(TextEncoder(tokenizer))
        if document is not None:
            document = checked_document(document, model, tokenizer)
            kind = "chat" if document.record.chat else "plain"
            turns = replace(turns, document=kind, template=document.record.chat_template)
            if budget is None and budget_bytes is None:
                budget = max(_BUDGET, positions) if self._obstacle else _BUDGET
        self._fingerprint = fingerprint(model)
        self.model = model
        self.tokenizer = tokenizer
        self.document = document
        """The cache that everything follows; None: there is none."""
        self.budget = budget_in_slots(model, budget, budget_bytes)
        self.tail = int(tail)
        self.room = max(1, (self.budget - self.tail) // 3) if room is None else room
        check_least(1, room=self.room)
        self.room = int(self.room)
        self.num_kept = int(num_kept)
        self.piece = int(piece)
        self.method = method
        self.protect = joined_ranges(protect, positions)
        self.num_compactions = 0
        """How often the session has compressed what it holds."""
        self._encoder = turns.encoder
        self._state = self._empty_state()
        self._turns = turns
        self._lock = ExitStack()
        self._locked_path: Path | None = None
        if self.protect:
            self._compressor.check_protects()
        check_budget(self.budget, self.tail, self.room, self.protect)

    @property
    def num_tokens(self) -> int:
        """The number of tokens appended so far, without those of the document."""
        return self._state.num_tokens

    @property
    def ids(self) -> Int[Tensor, " tokens"]:
        """The tokens appended so far."""
        return self._state.ids.clone()

    @property
    def held_slots(self) -> float:
        """KV slots per layer and head after the document, on average; at most ``budget``."""
        return self._state.held_slots

    @property
    def nbytes(self) -> int:
        """Bytes of everything that the session keeps: slots, those of the document included, and
        queries for later fits.
        """
        return self._state.nbytes

    @property
    def cache(self) -> CompactCache:
        """Document and tokens so far as a compact cache, which later tokens do not change.

        Raises:
            InputError: no token was appended, and there is no document.
        """
        state = self._state
        if self.document is not None and not state.num_tokens:
            return self.document
        self._check_tokens_exist()
        if isinstance(state, ReadTokens):
            whole = append(self.model, state.document, state.ids.unsqueeze(0))
        else:
            whole = state.cache(self._fingerprint, self.protect)
        # a turn that the document opened has ended
        return replace(whole, record=replace(whole.record, chat=None, chat_template=""))

    @property
    def next_logits(self) -> Float[Tensor, " vocab"]:
        """Logits of the token that comes next, as the last token was read.

        Right after a compaction they are from the cache before it. ``generate`` reads the last
        token again, over the compact cache, and may begin with another token than their argmax.

        Raises:
            InputError: no token was appended.
        """
        self._check_tokens_exist()
        self._check_model()
        hidden: Any = self._state.hidden
        with torch.no_grad():
            return logits_from_hidden(self.model, hidden[0, -1])

    def append(self, tokens: Tokens, *, protect: bool = False) -> None:
        """Append a text or token ids, and compress what the budget does not hold.

        A text at the start begins as the tokenizer begins a text, with a BOS token for example;
        later ones continue the text before, or the document.

        Args:
            tokens: at least one token.
            protect: these tokens stay exact for ever.

        Raises:
            InputError: no token, more tokens than the model has positions, or more protected ones
                than the budget holds. The session is then as it was before.
        """
        ids = self._encoded(tokens)
        start = self.num_tokens
        with self._restored_after_failure():
            if protect:
                added = (start, start + len(ids))
                self.protect = joined_ranges([*self.protect, added], start + len(ids))
                self._compressor.check_protects()
                check_budget(self.budget, self.tail, self.room, self.protect)
            self._append(ids)

    def score(self, tokens: Tokens) -> Float[Tensor, "tokens vocab"]:
        """Logits after each of some tokens that are not appended; the session does not change.

        Args:
            tokens: text or token ids that follow what the session holds.

        Raises:
            InputError: no token, or more than the model has positions.
        """
        ids = self._encoded(tokens)
        self._check_model()
        self._check_positions(len(ids))
        _, hidden = self._state.run(self.model, ids)
        with torch.no_grad():
            return logits_from_hidden(self.model, hidden[0])

    def generate(
        self,
        prompt: Tokens | None = None,
        *,
        max_new_tokens: int = 64,
        streamer: Any = None,
        **settings: Any,
    ) -> str:
        """Append a prompt, generate an answer, append it as well, and return its text.

        Generation is greedy unless ``settings`` say otherwise, and ends at one of the model's
        end-of-text tokens. A long answer is compacted on the way like other text: its tokens run
        once one by one, and once together for their queries.

        Args:
            prompt: text or token ids; None: the answer continues what was appended.
            max_new_tokens: most tokens of the answer, at least 1.
            streamer: of transformers, such as ``TextStreamer(tokenizer, skip_prompt=True)``.
            settings: of generation, such as do_sample=True, temperature=0.7; those that look at
                earlier tokens, and several beams or answers, are not possible.

        Raises:
            InputError: as ``append``; no prompt, and no token to continue; or a setting that is not
                possible.
        """
        ids = self.generate_ids(
            prompt, max_new_tokens=max_new_tokens, streamer=streamer, **settings
        )
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def generate_ids(
        self,
        prompt: Tokens | None = None,
        *,
        max_new_tokens: int = 64,
        streamer: Any = None,
        **settings: Any,
    ) -> Int[Tensor, " new"]:
        """As ``generate``; the token ids of the answer."""
        check_least(1, max_new_tokens=max_new_tokens)
        check_settings(settings)
        row = SessionRow(self._ends(settings), max_new_tokens, streamer)
        with self._restored_after_failure():
            if prompt is not None:
                self.append(prompt)
            return self._answer(row, settings, list)

    def _answer(self, row: Row, settings: Mapping[str, Any], kept: _Kept) -> Int[Tensor, " new"]:
        """The token ids of an answer, which is appended.

        Args:
            row: takes the tokens.
            settings: of generation.
            kept: the tokens of a complete answer that are appended.
        """
        self._check_tokens_exist()
        self._check_model()
        row.max_new_tokens = self._answer_length(row.max_new_tokens)
        streamer = row.streamer if isinstance(row, SessionRow) else None
        if streamer is not None:
            streamer.put(self._state.ids[-1:].cpu())
        start = self.num_tokens
        while not row.is_done:
            generate(
                self.model,
                inputs_after(self.model, self._state),
                [row],
                num_tokens=max(1, int(self.budget - self.held_slots)),
                **settings,
            )
            num_appended = self.num_tokens - start
            ids = kept(row.ids) if row.is_done else row.ids
            # a stop text that began before a compaction stays: what is appended is not changed
            if ids[:num_appended] != row.ids[:num_appended]:
                ids = row.ids
            new = ids[num_appended:]
            if new:
                self._append(self._state.ids.new_tensor(new))
        if streamer is not None:
            streamer.end()
        return self._state.ids[start:]

    def _answer_length(self, max_new_tokens: int) -> int:
        """The largest number of tokens in an answer: so many, or the positions left."""
        if self.document is not None:
            ids = self._state.ids.unsqueeze(0)
            return answer_length(self.model, self.document, ids, max_new_tokens)
        self._check_positions(1)
        return min(max_new_tokens, positions_of(self.model.config) - self.num_tokens)

    def turn(self, text: str, *, role: str = "user", protect: bool = False) -> None:
        """Append one turn in the tokenizer's chat template; no answer is generated.

        The template knows turns alone: what ``append`` and ``generate`` added is no part of the
        conversation that it writes. Of a document in the template, the first turn is the end of
        the user's turn that the document opens. After a document without it, turns are lines.

        A template may write earlier turns in another way than before, without their reasoning for
        example. What changes is then read again, as long as it is exact.

        Args:
            text: of the turn.
            role: "user", "system" or "assistant".
            protect: the turn stays exact for ever.

        Raises:
            InputError: as ``append``; or a template that fails, or changes earlier turns that are
                compressed or protected.
        """
        self._append_turn(role, text, protect=protect, is_answered=False)

    def chat(
        self, text: str, *, max_new_tokens: int = 256, streamer: Any = None, **settings: Any
    ) -> str:
        """Append a user's turn in the chat template, and generate and append the answer.

        Args:
            text: of the user's turn.
            max_new_tokens, streamer, settings: as in ``generate``.

        Raises:
            InputError: as ``turn``.
        """
        check_least(1, max_new_tokens=max_new_tokens)
        check_settings(settings)
        row = SessionRow(self._ends(settings), max_new_tokens, streamer)
        return self._ask(text, row, settings, list)

    def ask(
        self, text: str, sampling: Sampling | None = None, *, on_text: TakeText | None = None
    ) -> Answer:
        """As ``chat``, with the settings of ``kvcat generate``; what ``kvcat chat`` calls.

        Args:
            text: of the user's turn.
            sampling: how to decode; None: ``Sampling()``. A stop text is no part of the answer.
            on_text: called with each new piece of text; joined they are the answer's text.

        Raises:
            InputError: as ``turn``; or a stop text that no answer's text can hold.
        """
        answers: list[Answer] = []
        sampling = sampling or Sampling()
        stream = AnswerStream(self.tokenizer, sampling.stop, on_text)
        row = AnswerRow(self.model, stream, sampling, lambda: False, answers.append)

        def kept(ids: list[int]) -> list[int]:
            (answer,) = answers
            is_cut = answer.finish_reason == "stop" and ids[-1] not in end_tokens(self.model)
            return self._encoder.behind(answer.text) if is_cut else ids

        self._ask(text, row, {}, kept)
        return answers[0]

    def _ask(self, text: str, row: Row, settings: Mapping[str, Any], kept: _Kept) -> str:
        """The answer to a user's turn; both are appended. Arguments as in ``_answer``."""
        has_lines = self._turns.document == "plain"  # which have no control token at their end

        def kept_of_turn(ids: list[int]) -> list[int]:
            is_ended = has_lines and self._ends_answer(ids[-1], settings)
            return ids[:-1] if is_ended else kept(ids)

        with self._restored_after_failure():
            self._append_turn("user", text, protect=False, is_answered=True)
            ids = self._answer(row, settings, kept_of_turn)
            is_ended = len(ids) > 0 and self._ends_answer(int(ids[-1]), settings)
            answer = self._decoded(ids[:-1] if is_ended else ids)
            end = self._decoded(ids[-1:]) if is_ended else ""
            answered = self._turns.answered(answer, end)
            self._turns = replace(answered, num_tokens=self.num_tokens)
        return answer

    def compact(self, num_slots: int | None = None) -> None:
        """Compress all but the last ``tail`` tokens now.

        Args:
            num_slots: slots per layer and head of the compact cache, on average; None:
                ``budget - tail - room``.

        Raises:
            InputError: no tokens but the tail, a number of slots out of its range, or a model for
                which nothing is ever compressed.
        """
        if isinstance(self._state, ReadTokens):
            raise InputError(self._obstacle)
        if self._state.num_exact <= self.tail:
            raise InputError(
                f"the {self._state.num_exact} exact tokens are the tail: nothing to compress"
            )
        self._check_model()
        slots = self.budget - self.tail - self.room if num_slots is None else num_slots
        check_least(1, num_slots=slots)
        self._state = self._compacted(self._state, slots)

    def save(self, path: str | Path) -> None:
        """Write the session to a file, whole or not at all, and lock the file for this process.

        The lock lasts until ``close``, the end of the process, or a save to another path.

        Raises:
            InputError: the file is locked by another session, or cannot be written.
        """
        path = Path(path)
        if isinstance(self._state, ReadTokens):
            raise InputError(f"no session is saved of such a model ({self._obstacle})")
        self._hold_lock(path)
        saved = SavedSession(
            state=self._state,
            fingerprint=self._fingerprint,
            settings={
                "budget": self.budget,
                "tail": self.tail,
                "room": self.room,
                "num_kept": self.num_kept,
                "piece": self.piece,
                "method": self.method if isinstance(self.method, str) else None,
                "protect": [list(each) for each in self.protect],
            },
            conversation=self._turns.as_json(),
            num_compactions=self.num_compactions,
        )
        write_session(path, saved)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        method: str | Compressor | None = None,
    ) -> "Session":
        """The session that ``save`` wrote; the file is locked for this process, as after ``save``.

        Args:
            path: of the file.
            model, tokenizer: of the session.
            method: another compressor than before; needed for a session that was saved with a
                ``Compressor`` in place of its name.

        Raises:
            InputError: a file that is missing, damaged, of another model or locked by another
                session; or no method.
        """
        path = Path(path)
        read_session(path, model)  # one that is missing or damaged gets no lock
        with ExitStack() as lock:
            lock.enter_context(session_lock(path))
            # again, behind the lock: another process may have written meanwhile
            saved = read_session(path, model)
            settings = dict(saved.settings)
            settings["method"] = settings["method"] if method is None else method
            if settings["method"] is None:
                raise InputError(f"{path} does not name its method: give method=")
            session = cls(model, tokenizer, document=saved.state.document, **settings)
            session._state = saved.state
            session._turns = session._turns.restored(saved.conversation)
            session.num_compactions = saved.num_compactions
            session._lock = lock.pop_all()
            session._locked_path = path.absolute()
        return session

    def close(self) -> None:
        """Release the lock on the session's file."""
        self._lock.close()
        self._locked_path = None

    def __copy__(self) -> "Session":
        """A branch: a session that continues from the same tokens, without the lock on a file."""
        branch = object.__new__(type(self))
        vars(branch).update(vars(self))
        branch._lock = ExitStack()
        branch._locked_path = None
        return branch

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _restored_after_failure(self) -> Iterator[None]:
        """A block after whose failure the session is as it was before."""
        before = (self._state, self._turns, self.protect, self.num_compactions)
        try:
            yield
        except BaseException:
            self._state, self._turns, self.protect, self.num_compactions = before
            raise

    def _append(self, ids: Int[Tensor, " new"]) -> None:
        """Append tokens piece by piece."""
        self._check_model()
        self._check_positions(len(ids))
        state = self._state
        for piece in ids.split(min(self.piece, len(ids))):
            state, _ = state.run(self.model, piece)
            if state.held_slots > self.budget:
                state = self._compacted(state, self.budget - self.tail - self.room)
        self._state = state

    def _empty_state(self) -> SessionState | ReadTokens:
        """The state without tokens."""
        if self._obstacle and self.document is not None:
            no_tokens = torch.zeros(0, dtype=torch.long, device=self.model.device)
            return ReadTokens(no_tokens, self.document)
        return SessionState.empty(self.model, self.document)

    def _compacted(self, state: SessionState | ReadTokens, num_slots: int) -> SessionState:
        """The state after a compaction to so many slots and the tail."""
        if isinstance(state, ReadTokens):
            raise InputError(
                f"{state.num_tokens} tokens after the document need more than the budget of "
                f"{self.budget} slots ({self._obstacle})"
            )
        whole = state.trace(self.model, self._fingerprint, self.tail)
        protect = clipped(self.protect, 0, whole.prefix_len)
        trace = placed_after(protecting(whole, protect))
        repeated = self._repeated(trace)
        fitted = fitted_also_to(trace, repeated) if self._compressor.fits_queries else trace
        try:
            compact = self._compressor(fitted, num_slots=min(num_slots, trace.prefix_len))
        except torch.linalg.LinAlgError as error:  # of a file with absurd numbers
            raise InputError(f"the session cannot be compressed: {one_line(error)}") from error
        self.num_compactions += 1
        return state.compacted(compact, keep_queries(trace, self.num_kept, repeated))

    def _repeated(self, trace: Trace) -> list[QuerySet]:
        """The queries of the tokens after the compact cache, repeated after the prefix.

        [] for a method that does not fit them, for queries that cannot be moved, for a tokenizer
        that cannot encode the instruction, and where the model has too few positions.
        """
        is_fitted = self._compressor.fits_queries and trace.rotation is not None
        if not is_fitted or not self._instruction:
            return []
        return repeated_tokens(trace, torch.tensor(self._instruction), trace.past_len)

    @cached_property
    def _instruction(self) -> list[int]:
        """Token ids of the instruction to repeat a text; [] if the tokenizer cannot encode it."""
        return instruction_ids(self.model, self._encoder)

    def _ends_answer(self, token: int, settings: Mapping[str, Any]) -> bool:
        """Whether a token ended an answer with these settings and is no part of its text.

        A setting may name an ordinary token, such as a full stop, which is part of the text.
        """
        is_end = token in self._ends(settings)
        is_of_model = "eos_token_id" not in settings
        return is_end and (is_of_model or token in self._encoder.control_tokens)

    def _ends(self, settings: Mapping[str, Any]) -> list[int]:
        """The ids of the tokens that end an answer with these settings."""
        if "eos_token_id" not in settings:
            return end_tokens(self.model)
        ends = settings["eos_token_id"]
        return torch.as_tensor([] if ends is None else ends).flatten().tolist()

    def _decoded(self, ids: Int[Tensor, " tokens"]) -> str:
        """The text of tokens, control tokens included, as it is."""
        text: Any = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _append_turn(self, role: str, text: str, *, protect: bool, is_answered: bool) -> None:
        self._encoder.check_fits(text, positions_of(self.model.config))
        added = self._turns.added(role, text, is_answered=is_answered)
        with self._restored_after_failure():
            if added.rewritten is not None:
                self._rewind(added.ids, added.rewritten, protect=protect)
            self.append(added.ids[self.num_tokens if added.rewritten else 0 :], protect=protect)
            self._turns = replace(added.turns, num_tokens=self.num_tokens)

    def _rewind(self, ids: Sequence[int], reason: InputError, *, protect: bool) -> None:
        """Drop the tokens from the first that differs from those of a conversation on.

        Args:
            ids: of the conversation, with at least one more token.
            reason: raised if they cannot be dropped: they are compressed or protected, or not all
                tokens are those of turns.
            protect: a turn will be protected.
        """
        state = self._state
        pairs = zip(state.ids.tolist(), ids[:-1], strict=False)  # one at least is read again
        num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        is_mixed = self._turns.num_tokens != state.num_tokens
        is_compressed = 0 < state.past_len >= num_common
        if is_mixed or is_compressed or protect or self.protect:
            raise reason
        if isinstance(state, ReadTokens) or not num_common:
            self._state = self._empty_state()
        else:
            self._state = state.cropped(num_common)

    def _encoded(self, tokens: Tokens) -> Int[Tensor, " new"]:
        is_first = not self.num_tokens
        return token_ids(tokens, self.model, self._encoder, is_first=is_first)

    def _check_tokens_exist(self) -> None:
        if not self.num_tokens:
            raise InputError("the session holds no token: append a text first")

    def _check_model(self) -> None:
        """Raise an ``InputError`` if the model is not the one that the session began with."""
        known = fingerprint(self.model)
        if known != self._fingerprint:
            raise InputError(
                "the model has changed (weights or settings) since the session began: its "
                f"fingerprint is {known[:12]}, the session's {self._fingerprint[:12]}"
            )

    def _check_positions(self, num_new: int) -> None:
        num_held = self.num_tokens + (0 if self.document is None else self.document.num_tokens)
        check_length("the conversation", num_held + num_new, self.model.config)

    def _hold_lock(self, path: Path) -> None:
        """Lock a session's file, and release the lock on another one."""
        path = path.absolute()
        if path == self._locked_path:
            return
        lock = session_lock(path)
        self.close()
        self._lock.enter_context(lock)
        self._locked_path = path
