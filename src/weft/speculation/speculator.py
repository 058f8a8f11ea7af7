"""The ``Drafter`` of an engine: all sources of all sequences, and the number of drafts that a step verifies.

    draft    followers --proposals--> the best one of each sequence --survivals--> choice --> drafts
    settle   every proposal is scored against the new tokens (chances); the followers move on
    observe  the step's seconds correct the costs

For each sequence the proposal that promises most tokens competes. Sources are asked in order, up to one that is in the
middle of a long match and fills the verify run. A grammar cuts other proposals at the first token that it forbids. A
follower whose proposals are not drafted pauses after PATIENCE steps, each time for longer, until one is drafted.

While the host budget sleeps (``choice``), nothing is asked and nothing is fed. A sequence that began before
is *stale* then, until a settle brings the tokens that it missed. In batches so large that no draft would pay,
it does not even begin sequences.

The cost of a step without drafts must be known first, so it is measured before the first draft. A step counts as plain
if those before it were plain too, without the head: then caches are warm, and decodes go on from step to step. Text
that is drafted in every step leaves no such step, so a few in PLAIN_EVERY are kept plain.

``draft`` may be called again for a plan that replaces a dropped one. Everything that it stores is either a copy of its
result or a value that a second call would compute again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from weft.costs.rows import RowCosts
from weft.memory.prefix.tree import PrefixTree
from weft.pictures import token_count
from weft.speculation.choice import FEW_SEQUENCES, ByAdapter, Chances, HostBudget, OwnChances, choose, may_pay
from weft.speculation.drafter import (
    PLAIN_STEPS,
    SOURCES,
    DraftGrammar,
    DraftRow,
    Follower,
    Proposal,
    SourceName,
    SpeculationCounters,
    SpeculationStats,
)
from weft.speculation.mtp import HeadChances, HeadPlan, MtpFollower
from weft.speculation.sources import SALT_TOKENS_MAX, AnswerLibrary, GrammarFollower, PredictionFollower, SuffixFollower
from weft.speculation.text_index import LONG_MATCH
from weft.speculation.tree import TreeFollower

if TYPE_CHECKING:
    from weft.speculation.drafter import Int32s
from weft.units import PAD

DRAFTS_MAX = 15
"""Drafts of one sequence in one step, by default."""
_PLAIN_EVERY = 150
_PLAIN_WAIT = 64
"""Most steps that are kept plain."""
_PATIENCE = 16
_PAUSE = 16
_PAUSE_MAX = 64
SLOW_GRAMMAR_S = 0.002
"""Seconds that a grammar may take for the drafts of a step before it counts as slow; usual ones take a hundredth."""
_SLOW_STEPS_MAX = 4
"""Slow steps of a sequence after which it has no more drafts."""


class _SequenceSource:
    """Source of drafts of one sequence: its follower, chances and pause."""

    __slots__ = ("chances", "follower", "idle", "name", "pause", "pauses", "proposal")

    def __init__(self, name: SourceName, follower: Follower, chances: OwnChances | HeadChances) -> None:
        self.name = name
        self.follower = follower
        self.chances = chances
        self.proposal: Proposal | None = None
        """Proposal for the step that is planned."""
        self.idle = 0
        """Steps since one of its proposals was drafted."""
        self.pause = 0
        """Steps until it is asked again."""
        self.pauses = 0

    def settle(self, tokens: Sequence[int], *, drafted: bool) -> None:
        self.follower.extend(tokens)
        if drafted:
            self.idle = self.pause = self.pauses = 0
        elif self.pause:
            self.pause -= 1
        elif self.name != "mtp":  # the head pauses by itself
            self.idle += 1
            if self.idle >= _PATIENCE:
                self.pause = min(_PAUSE << self.pauses, _PAUSE_MAX)
                self.pauses += 1
                self.idle = _PATIENCE - 1


class _Speculation:
    """State of one sequence."""

    __slots__ = ("answer", "drafted", "grammar", "salt", "slow_steps", "sources")

    def __init__(
        self, salt: str, answer: list[int], sources: list[_SequenceSource], grammar: GrammarFollower | None
    ) -> None:
        self.salt = salt
        self.answer = answer
        self.sources = sources
        self.grammar = grammar
        self.slow_steps = 0
        """Steps for which the grammar took more than SLOW_GRAMMAR_S."""
        self.drafted: _SequenceSource | None = None
        """The follower whose proposal is in the step that is planned."""


class Speculator:
    """A ``Drafter`` of all sources. ``sources``: the sources in use; ``tree``: the prefix tree, None without a prefix
    cache; ``drafts_max``: most drafts of one sequence in one step. ``head_seconds``: seconds of the model's own head
    for one sequence, by drafts, if ``mtp`` is in use. ``prompt_share``: see ``HeadPlan``. ``salt_tokens``: most tokens
    of the answers of one salt that drafts come from. ``clock``: seconds of the host; with a constant clock the drafter
    never sleeps.
    """

    def __init__(
        self,
        sources: tuple[SourceName, ...] = SOURCES,
        *,
        costs: RowCosts | None = None,
        tree: PrefixTree | None = None,
        drafts_max: int = DRAFTS_MAX,
        head_seconds: dict[int, float] | None = None,
        prompt_share: float | None = None,
        salt_tokens: int = SALT_TOKENS_MAX,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.sources = sources
        self.costs = costs or RowCosts()
        self.counters = SpeculationCounters(sources)
        self._tree = tree
        self._drafts_max = drafts_max
        self._chances = ByAdapter(Chances)
        self._library = AnswerLibrary(salt_tokens=salt_tokens)
        self._clock = clock
        self._budget = HostBudget()
        self._room = FEW_SEQUENCES * drafts_max
        """Most drafts of a step, as of the last call of ``draft``."""
        self._stale: set[int] = set()
        """Sequences with tokens that were not settled."""
        self._head = HeadPlan(head_seconds or {}, drafts_max, prompt_share=prompt_share) if "mtp" in sources else None
        self._others_draft = False
        """Whether the planned step verifies only drafts of other sources, and more than the head would draft."""
        self._by_key: dict[int, _Speculation] = {}
        self._step_s = 0.0
        self._step_accepted = 0
        self._step_head_accepted = 0
        self._steps_busy = 0
        """Steps with drafts or the head since the last measured plain step."""
        self._plain_run: tuple[int, int] = (PAD, 0)
        """The place of the plain figure, and how many plain steps in a row have it."""
        self._head_ran = False
        """Whether the head ran after the last step."""

    # ------------------------------------------------------------------ the protocol

    @property
    def awake(self) -> bool:
        return self._budget.awake

    def wake(self) -> None:
        if not self._budget.awake:
            self._budget.wake()
            self._stale.update(self._by_key)

    def begin(
        self,
        key: int,
        tokens: Int32s,
        *,
        prompt_length: int,
        salt: str | None,
        prediction: Sequence[int] | None,
        grammar: DraftGrammar | None = None,
        adapter: str = "",
    ) -> None:
        began_s = self._clock()
        answer = tokens[prompt_length:].tolist()
        followers: dict[SourceName, Follower] = {}
        if "prediction" in self.sources and prediction:
            followers["prediction"] = PredictionFollower(prediction, answer)
        matcher = GrammarFollower(grammar, answer) if grammar is not None else None
        if "grammar" in self.sources and matcher is not None:
            followers["grammar"] = matcher
        if "tree" in self.sources and self._tree is not None:
            followers["tree"] = TreeFollower(self._tree, salt or "", tokens)
        if "suffix" in self.sources:
            followers["suffix"] = SuffixFollower(self._library, salt or "", tokens[:prompt_length], answer)
        chances = self._chances.of(adapter)
        sources = [_SequenceSource(name, follower, OwnChances(chances, name)) for name, follower in followers.items()]
        if self._head is not None:
            sources.append(_SequenceSource("mtp", MtpFollower(), self._head.begin(key, adapter)))
        self._by_key[key] = _Speculation(salt or "", answer, sources, matcher)
        self._budget.spend(self._clock() - began_s)

    def forget(self) -> None:
        self._library.forget()

    def draft(self, rows: Sequence[DraftRow]) -> dict[int, tuple[int, ...]]:
        if not self._budget.awake:
            return {}
        began_s = self._clock()
        drafts = self._drafts(rows)
        self._budget.spend(self._clock() - began_s)
        return drafts

    def _drafts(self, rows: Sequence[DraftRow]) -> dict[int, tuple[int, ...]]:
        self._others_draft = False
        if not self.costs.measured(len(rows)) or self._keeps_plain:
            return {}
        self._room = max([row.limit for row in rows])  # the planner's own limit of a step is in there
        if self._is_hopeless(len(rows)):
            self._budget.rest()
            return {}
        best = [self._timed_best(row) for row in rows]
        offers = [survivals for _, survivals in best]
        if not any(offers):
            return {}
        counts = choose(offers, len(rows), self.costs)
        drafts: dict[int, tuple[int, ...]] = {}
        others_draft = self._head is not None
        usual = self._head.expected()[-1] if self._head is not None else 0.0
        for row, (source, survivals), count in zip(rows, best, counts, strict=True):
            if source is not None and source.proposal is not None and count:
                self._by_key[row.key].drafted = source
                drafts[row.key] = source.proposal.tokens[:count]
                others_draft = others_draft and source.name != "mtp" and sum(survivals[:count]) > usual
            else:
                others_draft = False
        self._others_draft = others_draft
        return drafts

    def _is_hopeless(self, sequences: int) -> bool:
        """Return whether no draft would pay in a step of ``sequences``, as far as its cost is known."""
        return (
            sequences > FEW_SEQUENCES
            and self.costs.measured(sequences)
            and not may_pay(sequences, min(sequences * self._drafts_max, self._room), self.costs)
        )

    def head_drafts(self, sequences: int, *, prompts: bool) -> int | None:
        head = self._head
        if self._budget.awake and self._is_hopeless(sequences):
            self._budget.rest()  # before the step begins its sequences
        if head is None:
            return None
        drafts = None
        if self._budget.awake and not self._keeps_plain and (prompts or self.costs.measured(sequences)):
            drafts = head.drafts(sequences, self.costs)
            if self._others_draft:
                drafts = 0 if head.writes_keys(sequences, self.costs) else None
        # The keys of a prompt serve the whole answer, and later prompts that begin with it.
        return 0 if drafts is None and prompts and head.reads_prompts(sequences, self.costs) else drafts

    def offer(self, key: int, tokens: Sequence[int], chances: Sequence[float]) -> None:
        state = self._by_key.get(key)
        for source in () if state is None else state.sources:
            if isinstance(source.follower, MtpFollower):
                source.follower.offer(tokens, chances)

    def settle(self, key: int, tokens: Sequence[int], *, drafted: int, accepted: int) -> None:
        state = self._by_key.get(key)
        if state is None:
            return
        began_s = self._clock()
        self._stale.discard(key)
        counters, author = self.counters, state.drafted if drafted else None
        for source in state.sources:
            if source.proposal is not None:
                right = source.chances.score(source.proposal, tokens)
                counters.proposed[source.name] += 1
                counters.right[source.name] += right > 0
                source.proposal = None
            source.settle(tokens, drafted=source is author)
        if state.grammar is not None and "grammar" not in self.sources:
            state.grammar.extend(tokens)
        state.drafted = None
        state.answer += tokens
        if author is not None:
            counters.drafted[author.name] += drafted
            counters.accepted[author.name] += accepted
            counters.sequence_steps += 1
            self._step_accepted += accepted
            self._step_head_accepted += accepted if author.name == "mtp" else 0
        self._budget.spend(self._clock() - began_s)

    def end(self, key: int) -> None:
        state = self._by_key.pop(key, None)
        self._stale.discard(key)
        if self._head is not None:
            self._head.end(key)
        if state is not None and "suffix" in self.sources:
            self._library.add(state.salt, state.answer)

    # ------------------------------------------------------------------ costs and numbers

    def observe(self, decodes: int, drafted: int, seconds: float, *, prefills: bool = False) -> None:
        """Record that a step of ``decodes`` sequences and ``drafted`` drafts took ``seconds``. Called after its
        ``settle``.
        """
        accepted, self._step_accepted = self._step_accepted, 0
        head_accepted, self._step_head_accepted = self._step_head_accepted, 0
        head_pays = self._head is not None and self._head.pays
        self._step_s = seconds
        self._count_plain(decodes, plain=not (drafted or prefills))
        if not prefills:
            if drafted:
                alone_s = self.costs.seconds(decodes)
                saved_s = alone_s * (1 + accepted / decodes) - seconds
                self.counters.steps += 1
                self.counters.saved_s += saved_s
                if self._head is not None and head_accepted:
                    self._head.earn(saved_s * head_accepted / accepted, self.costs)
                self.costs.note_verify(decodes, drafted, seconds)
            elif self._plain_run[1] >= PLAIN_STEPS:
                self._steps_busy = 0
                self.costs.note(decodes, seconds)
        was_awake = self._budget.awake
        self._budget.step(seconds, drafted=drafted > 0 or (was_awake and head_pays), sequences=decodes)
        self._end_sleep(was_awake, decodes)
        if self._head is not None:
            self._head.stepped(seconds, self.costs, drafted=False)
            if prefills:
                self._head.skip_prompts()

    def sleep_through(self, steps: int, seconds: float, decodes: int, last_s: float | None) -> None:
        self._plain_run = PAD, 0
        if last_s is not None:
            self._steps_busy = 0
            self.costs.note(decodes, last_s)
        self._budget.sleep_through(steps, seconds)
        self._end_sleep(False, decodes)
        if self._head is not None:
            self._head.stepped(seconds, self.costs, drafted=False, steps=steps)

    def _end_sleep(self, was_awake: bool, sequences: int) -> None:
        if not self._budget.awake or was_awake:
            return
        if self._is_hopeless(sequences):
            self._budget.rest()
        else:
            self._stale.update(self._by_key)

    def observe_head(self, sequences: int, drafts: int, seconds: float, *, prefills: bool = False) -> None:
        if self._head is None:
            return
        self.counters.saved_s -= seconds
        if prefills:
            self._head.pay_prompts(self._step_s, seconds, self.costs)
        elif drafts:
            self._head.earn(-seconds, self.costs)
            self._budget.spend(seconds)
            self._head_ran = True
            self._head.note(sequences, drafts, seconds, self.costs)
            self._head.stepped(0.0, self.costs, drafted=True)

    @property
    def _keeps_plain(self) -> bool:
        return self._steps_busy >= _PLAIN_EVERY

    def _count_plain(self, decodes: int, *, plain: bool) -> None:
        """Count a step. ``observe_head`` follows if the head ran after it."""
        if self._keeps_plain or not plain or self._head_ran:
            self._steps_busy += 1
        if self._steps_busy >= _PLAIN_EVERY + _PLAIN_WAIT:
            self._steps_busy = 0  # prompts leave no plain step
        place = self.costs.place(decodes) if plain and not self._head_ran else PAD
        self._plain_run = place, self._plain_run[1] + 1 if place == self._plain_run[0] else int(place != PAD)
        self._head_ran = False

    def stats(self) -> SpeculationStats:
        return self.counters.stats()

    def _timed_best(self, row: DraftRow) -> tuple[_SequenceSource | None, list[float]]:
        """Return ``_best``. A sequence whose grammar is slow loses its sources, because every other sequence waits."""
        state = self._by_key.get(row.key)
        if state is None or state.grammar is None:
            return self._best(row)
        began_s = self._clock()
        best = self._best(row)
        state.slow_steps += self._clock() - began_s > SLOW_GRAMMAR_S
        if state.slow_steps >= _SLOW_STEPS_MAX:
            state.sources, state.grammar = [], None
        return best

    def _best(self, row: DraftRow) -> tuple[_SequenceSource | None, list[float]]:
        """Return the follower whose proposal promises most tokens, and the survivals of those tokens."""
        state = self._by_key.get(row.key)
        count = min(row.limit, self._drafts_max)
        if state is None or count <= 0 or row.key in self._stale:
            return None, []
        state.drafted = None
        best, best_survivals, most = None, [], 0.0
        for source in state.sources:
            if source.pause:
                continue
            proposal = source.follower.propose(count)
            if proposal is not None and min(proposal.tokens) < 0:  # rows of a picture come next there
                ids = token_count(proposal.tokens)
                proposal = proposal.first(ids) if ids else None
            if proposal is not None and state.grammar is not None and source.name != "grammar":
                allowed = state.grammar.allowed(proposal.tokens)
                proposal = proposal.first(allowed) if allowed else None
            source.proposal = proposal
            if proposal is None:
                continue
            survivals = source.chances.survivals(proposal)
            expected = sum(survivals)
            if expected > most:
                best, best_survivals, most = source, survivals, expected
                if proposal.match >= LONG_MATCH and len(survivals) == count:
                    break  # it is in the middle of a long match: the next sources would hardly promise more
        return best, best_survivals
