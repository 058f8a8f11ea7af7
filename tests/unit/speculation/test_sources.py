"""Each source by itself: a perfect repeater gets its drafts, asking changes nothing, salts stay apart."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.constrained import END, compiler, tokenizer
from tests.unit.speculation.texts import edited, int32s, prose
from weft.errors import ConfigError
from weft.memory.prefix.tree import PrefixTree
from weft.speculation.drafter import SOURCES, Follower, Proposal, parse_sources
from weft.speculation.sources import AnswerLibrary, GrammarFollower, PredictionFollower, SuffixFollower, salt_tokens
from weft.speculation.text_index import Context
from weft.speculation.tree import TreeFollower
from weft.text.grammars import json_grammar
from weft.units import PAGE_TOKENS, PageId

PROMPT = prose(1, 200)
ANSWER = prose(2, 150)


def tree_of(*texts: list[int], salt: str = "") -> PrefixTree:
    tree = PrefixTree(paged=True)
    for text in texts:
        whole = len(text) // PAGE_TOKENS * PAGE_TOKENS
        first = tree.page_count
        pages = [PageId(first + page) for page in range(whole // PAGE_TOKENS)]
        node, _ = tree.insert(tree.root(salt), int32s(text[:whole]).tobytes(), pages)
        if text[whole:]:
            tree.add_tail(node, int32s(text[whole:]).tobytes(), [PageId(first + len(pages))])
    return tree


def prediction_of_answer() -> Follower:
    return PredictionFollower(ANSWER)


def tree_with_answer() -> Follower:
    return TreeFollower(tree_of(PROMPT + ANSWER), "", int32s(PROMPT))


def suffix_of_prompt() -> Follower:
    return SuffixFollower(AnswerLibrary(), "", int32s([*PROMPT[:-8], *PROMPT[-8:], *ANSWER, *PROMPT[-8:]]))


def suffix_of_library() -> Follower:
    library = AnswerLibrary()
    library.add("", PROMPT[-8:] + ANSWER)
    return SuffixFollower(library, "", int32s(PROMPT))


REPEATERS = [prediction_of_answer, tree_with_answer, suffix_of_prompt, suffix_of_library]


@pytest.mark.parametrize("make", REPEATERS)
def test_a_perfect_repeater_gets_its_drafts(make: Callable[[], Follower]) -> None:
    follower = make()
    chance = random.Random(3)
    at = 0
    while at < len(ANSWER):
        rest = ANSWER[at : at + 15]
        proposal = follower.propose(15)
        assert proposal is not None
        assert proposal.tokens[: len(rest)] == tuple(rest)
        step = chance.randint(1, len(rest))
        follower.extend(ANSWER[at : at + step])
        at += step


@pytest.mark.parametrize("make", REPEATERS)
def test_asking_changes_nothing(make: Callable[[], Follower]) -> None:
    """One follower is asked once in each step, its twin four times for changing counts."""
    once, often = make(), make()
    proposed = 0
    for token in edited(ANSWER, 0.1, 5):
        answers = [often.propose(count) for count in (3, 15, 1, 15)]
        assert answers[1] == answers[3] == once.propose(15)
        if answers[1] is not None:
            assert answers[0] == Proposal(answers[1].tokens[:3], answers[1].match)
            proposed += 1
        once.extend([token])
        often.extend([token])
    assert proposed > 5


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(1, 60))
def test_a_prediction_rejoins_after_any_difference(seed: int, removed: int, added: int) -> None:
    """``removed`` tokens of the guess are replaced by ``added`` others; soon after, it is right again."""
    guess = random.Random(seed).sample(range(6000), 300)
    assert tokens_to_rejoin(guess, removed, added, seed) <= 5


def test_a_prediction_rejoins_where_words_repeat() -> None:
    """No sooner than the words after the difference stand in one place of the guess. Rarely later: of the
    places of a frequent word, a lookup compares a few."""
    late = 0
    for case in range(400):
        draw = random.Random(case)
        seed, removed, added = draw.randrange(10_000), draw.randint(1, 60), draw.randint(1, 60)
        guess = prose(seed, 300)
        rest, unique = guess[100 + removed :], 1
        while sum(guess[at : at + unique] == rest[:unique] for at in range(301 - unique)) > 1:
            unique += 1
        late += tokens_to_rejoin(guess, removed, added, seed) > max(5, unique)
    assert late <= 1


def tokens_to_rejoin(guess: list[int], removed: int, added: int, seed: int) -> int:
    rest = guess[100 + removed :]
    follower = PredictionFollower(guess)
    follower.extend(guess[:100])
    follower.extend([6000 + token for token in prose(seed + 1, added)])
    for rejoined in range(20):
        proposal = follower.propose(4)
        if proposal is not None and proposal.match and proposal.tokens == tuple(rest[rejoined : rejoined + 4]):
            return rejoined
        follower.extend([rest[rejoined]])
    return 20


def test_a_prediction_is_followed_across_a_preamble() -> None:
    follower = PredictionFollower(ANSWER)
    follower.extend([6000 + at for at in range(200)])
    follower.extend(ANSWER[:3])
    proposal = follower.propose(5)
    assert proposal is not None
    assert proposal.tokens == tuple(ANSWER[3:8])


@pytest.mark.parametrize("cut", [0, 3, 15, 16, 40, 100])
def test_the_tree_continues_a_place_inside_an_edge_and_a_page(cut: int) -> None:
    tree = tree_of(PROMPT + ANSWER)
    follower = TreeFollower(tree, "", int32s(PROMPT + ANSWER[:cut]))
    proposal = follower.propose(16)
    assert proposal is not None
    assert proposal.tokens == tuple(ANSWER[cut : cut + 16])


def test_the_tree_prefers_the_child_used_last() -> None:
    tree = PrefixTree(paged=False)
    other = prose(9, 160)
    prompt = PROMPT[:192]
    node, _ = tree.insert(tree.root(""), int32s(prompt).tobytes(), [])
    for version, answer in enumerate((ANSWER[:144], other[:144])):
        tree.version = version
        tree.insert(node, int32s(answer).tobytes(), [])
    follower = TreeFollower(tree, "", int32s(prompt))
    assert follower.propose(4).tokens == tuple(other[:4])  # type: ignore[union-attr]
    follower.extend(ANSWER[:1])
    assert follower.propose(4).tokens == tuple(ANSWER[1:5])  # type: ignore[union-attr]


def test_a_tree_that_loses_nodes_between_steps_is_no_trouble() -> None:
    tree = tree_of(PROMPT + ANSWER)
    follower = TreeFollower(tree, "", int32s(PROMPT))
    before = follower.propose(8)
    leaf = next(node for node in tree.nodes() if not node.children)
    tree.remove(leaf)
    assert follower.propose(8) == before
    assert TreeFollower(tree, "", int32s(PROMPT)).propose(200) != before


def test_drafts_of_one_salt_never_reach_another() -> None:
    library = AnswerLibrary()
    library.add("a", PROMPT[-8:] + ANSWER)
    tree = tree_of(PROMPT + ANSWER, salt="a")
    for salt, reached in (("a", True), ("b", False), ("", False)):
        assert (SuffixFollower(library, salt, int32s(PROMPT)).propose(4) is not None) == reached
        assert (TreeFollower(tree, salt, int32s(PROMPT)).propose(4) is not None) == reached


def test_the_library_is_bounded_in_bytes_and_drops_the_salt_used_least_recently() -> None:
    library = AnswerLibrary(bytes_max=2_000_000)
    answers = {str(number): prose(number, 1500) for number in range(40)}
    for salt, answer in answers.items():
        library.add("0", answers["0"][:40])
        library.add(salt, answer)
        assert library.size_bytes <= 2_000_000
    held = [salt for salt, answer in answers.items() if library.lookup(salt, Context(answer[:20])) is not None]
    assert "0" in held
    assert "39" in held
    assert 2 <= len(held) < 10


def test_the_library_of_a_small_engine_holds_less_of_one_salt() -> None:
    assert [salt_tokens(mebibytes << 20) for mebibytes in (1, 96, 1024)] == [16_384, 98_304, 262_144]
    answers = [prose(number, 1500) for number in range(40)]
    sizes = []
    for tokens in (16_384, 262_144):
        library = AnswerLibrary(salt_tokens=tokens)
        for answer in answers:
            library.add("", answer)
            library.lookup("", Context(answer[:20]))
        held = [
            number
            for number, answer in enumerate(answers)
            if (match := library.lookup("", Context(answer[:20]))) is not None and match.length == 20
        ]
        assert held[-1] == 39
        sizes.append(len(held))
    assert sizes[0] < 20 < sizes[1] == 40


def test_answers_wait_for_a_lookup_and_the_newest_are_found() -> None:
    library = AnswerLibrary()
    answers = [list(range(number, number + 1500)) for number in range(0, 80_000, 2000)]
    for answer in answers:
        library.add("", answer)
    held = [number for number, answer in enumerate(answers) if library.lookup("", Context(answer[:20])) is not None]
    assert held == list(range(held[0], 40))
    assert 2 <= len(held) < 20
    library.add("", answers[0])  # the one after a lookup is found, and those before it still are
    assert library.lookup("", Context(answers[0][:20])) is not None
    assert library.lookup("", Context(answers[39][:20])) is not None


def test_a_grammar_forces_keys_and_cuts_other_drafts() -> None:
    schema = {
        "type": "object",
        "properties": {"temperature": {"type": "integer"}},
        "required": ["temperature"],
        "additionalProperties": False,
    }
    compiled = compiler().compile(json_grammar(schema, field="response_format"))
    text = tokenizer()
    follower = GrammarFollower(compiled, text.encode('{"'))
    proposal = follower.propose(30)
    assert proposal is not None
    assert text.decode(proposal.tokens).startswith('temperature"')
    assert follower.propose(3) == Proposal(proposal.tokens[:3], 0)
    right, wrong = text.encode('temperature":'), text.encode("temp: 3")
    assert follower.allowed(right) == len(right)
    assert follower.allowed(wrong) == len(text.encode("temp"))
    follower.extend(text.encode('temperature": 31}'))
    follower.extend([text.added_id(END)])
    assert follower.propose(5) is None
    assert follower.allowed(right) == 0


def test_names_of_sources() -> None:
    assert parse_sources("auto") == SOURCES
    assert parse_sources("off") == ()
    assert parse_sources("suffix, prediction") == ("prediction", "suffix")
    with pytest.raises(ConfigError, match=r"'eagle' is not a source.*prediction, grammar, tree, suffix"):
        parse_sources("suffix,eagle")
