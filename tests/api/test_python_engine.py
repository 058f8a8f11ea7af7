"""``from weft import Engine``: what a program gets, on tiny checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import weft
from tests.fixtures.checkpoints import EOS, IM_END, checkpoint, copy_checkpoint, make_checkpoint, reference, tokenizer
from weft import Engine, SamplingParams
from weft.api.completion import sampling_from
from weft.errors import (
    BusyError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    EngineUnavailableError,
    RequestError,
    WeftError,
)
from weft.text.tokenizer import Tokenizer

FAMILY = "qwen3_5"
TEXTS = ["The river runs past", "a page", "What is the number of the red key?"]


@pytest.fixture(scope="module")
def engine():
    with Engine(str(checkpoint(FAMILY)), memory="8MiB", max_queued_requests=8) as made:
        yield made


def idle(engine: Engine) -> bool:
    stats = engine.stats()
    return stats.running == stats.waiting == stats.memory.leases == 0


def greedy_by_transformers(text: str, steps: int) -> list[int]:
    tokens = tokenizer()(text)["input_ids"]
    made: list[int] = []
    with torch.inference_mode():
        for _ in range(steps):
            made.append(int(reference(FAMILY)(torch.tensor([tokens + made])).logits[0, -1].argmax()))
    return made


def test_importing_weft_does_not_import_torch():
    code = (
        "import sys, weft\nfrom weft import SamplingParams, Completion, Engine\n"
        "print('torch' in sys.modules, weft.__version__)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split()[0] == "False"
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        _ = weft.Engin


def test_texts_in_tokens_and_text_of_transformers_out(engine):
    completions = engine.generate(
        TEXTS, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, skip_special_tokens=False)
    )
    for number, (text, completion) in enumerate(zip(TEXTS, completions, strict=True)):
        assert (completion.prompt_index, completion.index) == (number, 0)
        assert completion.tokens == greedy_by_transformers(text, 12)
        assert completion.text == tokenizer().decode(completion.tokens)
        assert completion.finish_reason == "length"
        assert completion.prompt_tokens == tokenizer()(text)["input_ids"]


def test_a_prompt_may_be_text_or_token_ids_and_one_or_many(engine):
    fields = {"temperature": 0.0, "max_tokens": 5}
    ids = engine.tokenizer.encode(TEXTS[0])
    [by_text] = engine.generate(TEXTS[0], **fields)
    [by_ids] = engine.generate(ids, **fields)
    mixed = engine.generate([TEXTS[0], ids], **fields)
    assert by_text.tokens == by_ids.tokens == mixed[0].tokens == mixed[1].tokens
    assert engine.generate([], **fields) == []


def test_more_prompts_than_the_queue_holds_are_all_answered_in_order(engine):
    prompts = [[5 + i % 40, 7] for i in range(50)]
    refused = engine.stats().requests_refused
    completions = engine.generate(prompts, n=2, seed=1, max_tokens=3, ignore_eos=True)
    assert [(c.prompt_index, c.index) for c in completions] == [(i, j) for i in range(50) for j in range(2)]
    assert all(len(c.tokens) == 3 for c in completions)
    assert engine.stats().requests_refused == refused
    assert idle(engine)


def test_the_checkpoints_own_sampling_is_the_default_and_keywords_change_single_fields(engine):
    assert engine.info.generation_defaults == {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    words = Tokenizer.load(Path(engine.info.directory))
    params = sampling_from(None, {"top_p": 0.5, "stop": "x"}, engine.info.generation_defaults, words)
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.7, 0.5, 20, ("x",))
    changed = sampling_from(SamplingParams(temperature=0.3), {"max_tokens": 4, "stop": ["a", "b"]}, {}, words)
    assert (changed.temperature, changed.top_p, changed.max_tokens, changed.stop) == (0.3, 1.0, 4, ("a", "b"))


def test_an_answer_ends_at_the_tokenizers_end_token_too(engine, tmp_path):
    """Fine-tunes change ``eos_token`` and leave generation_config.json as it was; vLLM ends at both."""
    fields = {"temperature": 0.0, "max_tokens": 20}
    ids = engine.tokenizer.encode(TEXTS[0])
    [whole] = engine.generate(ids, ignore_eos=True, **fields)
    new = next(i for i, token in enumerate(whole.tokens) if i > 3 and token not in whole.tokens[:i] and token < 350)
    directory = copy_checkpoint(checkpoint(FAMILY), tmp_path / "tuned")
    path = directory / "tokenizer_config.json"
    end = tokenizer().convert_ids_to_tokens(whole.tokens[new])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": end}))
    with Engine(str(directory), memory="8MiB") as tuned:
        [completion] = tuned.generate(ids, **fields)
        assert completion.tokens == whole.tokens[: new + 1]
        assert completion.finish_reason == "stop"
        assert tuned.info.eos_ids == [*engine.info.eos_ids, whole.tokens[new]]


def test_a_stream_brings_the_text_of_generate_in_pieces(engine):
    """A reader that is late gets several steps in one piece, hence the many tokens."""
    fields = {"temperature": 0.0, "max_tokens": 300, "ignore_eos": True}
    pieces = list(engine.stream(TEXTS[0], **fields))
    [whole] = engine.generate(TEXTS[0], **fields)
    assert len(pieces) > 1
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
    assert idle(engine)


def test_calls_may_overlap(engine):
    fields = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    alone = [engine.generate(text, **fields)[0].tokens for text in TEXTS]
    first, second = engine.stream(TEXTS[0], **fields), engine.stream(TEXTS[1], **fields)
    tokens: list[list[int]] = [[], []]
    tokens[0] += next(first).tokens
    tokens[1] += next(second).tokens
    assert engine.generate(TEXTS[2], **fields)[0].tokens == alone[2]
    for number, stream in ((1, second), (0, first)):
        for piece in stream:
            tokens[number] += piece.tokens
    assert tokens == alone[:2]


def test_leaving_a_stream_early_costs_nothing_more(engine):
    stream = engine.stream(TEXTS[0], max_tokens=500, ignore_eos=True)
    next(stream)
    assert engine.stats().running == 1
    stream.close()
    assert idle(engine)
    engine.stream(TEXTS[0], max_tokens=500)  # never asked for a piece: never started
    assert idle(engine)


def test_a_stop_string_ends_the_text_before_it_and_the_sequence_with_it(engine):
    [whole] = engine.generate(TEXTS[0], temperature=0.0, max_tokens=40, ignore_eos=True)
    stop = whole.text[10:13]
    [cut] = engine.generate(TEXTS[0], temperature=0.0, max_tokens=40, ignore_eos=True, stop=stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert len(cut.tokens) < len(whole.tokens)
    assert idle(engine)


def test_a_stop_token_ends_the_tokens_but_is_not_shown(engine):
    [whole] = engine.generate(TEXTS[0], temperature=0.0, max_tokens=20, ignore_eos=True)
    token = whole.tokens[6]
    [cut] = engine.generate(TEXTS[0], temperature=0.0, max_tokens=20, ignore_eos=True, stop_token_ids=[token])
    first = whole.tokens.index(token)
    assert cut.tokens == whole.tokens[: first + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", token)
    assert cut.text == engine.tokenizer.decode(cut.tokens[:-1])


def test_the_models_own_end_is_a_stop_without_a_reason(engine):
    end = engine.tokenizer.encode(IM_END)[0]
    assert set(engine.info.eos_ids) == {end, engine.tokenizer.encode(EOS)[0]}
    [answer] = engine.generate(TEXTS[0], logit_bias={end: 100.0}, max_tokens=9)
    assert (answer.tokens, answer.text, answer.finish_reason, answer.stop_reason) == ([end], "", "stop", None)


def test_logprobs_of_answer_and_prompt_come_with_the_completion(engine):
    [answer] = engine.generate(TEXTS[2], temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    assert [found.token for found in answer.logprobs] == answer.tokens
    assert all(len(found.top) == 2 and found.rank == 0 for found in answer.logprobs)
    assert answer.prompt_logprobs[0] is None
    assert [found.token for found in answer.prompt_logprobs[1:]] == answer.prompt_tokens[1:]


def test_a_conversation_goes_through_the_checkpoints_template(engine):
    messages = [{"role": "user", "content": "What is the number of the red key?"}]
    rendered = engine.render_chat(messages)
    expected = tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert engine.tokenizer.decode(rendered, skip_special_tokens=False) == expected
    answer = engine.chat(messages, temperature=0.0, max_tokens=6, ignore_eos=True)
    streamed = "".join(
        piece.text for piece in engine.stream_chat(messages, temperature=0.0, max_tokens=6, ignore_eos=True)
    )
    assert answer.text == streamed
    assert answer.prompt_tokens == rendered


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda e: e.generate("hello", temperature=-1.0), RequestError, "temperature is -1.0"),
        (lambda e: e.generate(["fine", ""]), RequestError, "prompt is empty"),
        (lambda e: e.generate([[1, 2], [3, 9999]]), RequestError, "9999"),
        (lambda e: e.generate([1] * 5000), ContextLengthError, "4096"),
        (lambda e: e.generate("hello", n=9, max_tokens=2), Exception, "limits.max_queued_requests"),
        (lambda e: e.generate("hello", max_tokens_=2), TypeError, "max_tokens_"),
        (lambda e: e.chat([{"role": "judge", "content": "x"}]), RequestError, "judge"),
        (lambda e: e.chat([{"content": "x"}]), RequestError, "role"),
        (lambda e: e.chat([{"role": "user", "content": "x"}], n=2), RequestError, "n is 2"),
        (lambda e: next(e.stream("x", top_p=3.0)), RequestError, "top_p"),
        (lambda e: e.generate(b"bytes"), RequestError, "not bytes"),
        (lambda e: e.generate(None), RequestError, "NoneType"),
        (lambda e: e.generate([[1.5]]), RequestError, r"\[1\.5\] is neither"),
        (lambda e: e.generate("x", temperature="hot"), RequestError, "temperature is 'hot'; it must be a number"),
        (lambda e: e.generate("x", max_tokens=2.5), RequestError, "max_tokens is 2.5; it must be a whole number"),
        (lambda e: e.generate("x", stop=5), RequestError, "stop is"),
        (lambda e: e.generate("x", logit_bias={"5": 1.0}), RequestError, "logit_bias names token '5'"),
        (lambda e: e.generate("x", {"max_tokens": 2}), RequestError, "sampling is a dict"),
    ],
)
def test_a_call_that_cannot_work_names_what_is_wrong_and_leaves_nothing_running(engine, call, error, words):
    with pytest.raises(error, match=words):
        call(engine)
    assert idle(engine)
    assert len(engine.generate("hello", max_tokens=2, ignore_eos=True)[0].tokens) == 2


def test_a_step_that_fails_is_an_error_with_its_cause(monkeypatch):
    with Engine(str(checkpoint(FAMILY)), memory="4MiB") as engine:

        def broken(plan: object) -> None:
            raise RuntimeError("the device burns")

        monkeypatch.setattr(engine._core.executor, "execute", broken)
        with pytest.raises(EngineUnavailableError, match="the device burns") as caught:
            engine.generate("hello")
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(EngineUnavailableError):
            engine.generate("hello")


def test_a_second_thread_is_told_and_the_first_goes_on(monkeypatch):
    """Negative control: without the turn, its step would run in the middle of the other one."""
    with Engine(str(checkpoint(FAMILY)), memory="4MiB") as engine:
        execute, told = engine._core.executor.execute, []

        def slow(plan: object) -> object:
            if not told:
                second = threading.Thread(target=lambda: told.append(_error_of(engine.generate)))
                second.start()
                second.join()
            return execute(plan)

        monkeypatch.setattr(engine._core.executor, "execute", slow)
        [answer] = engine.generate("hello", max_tokens=3, ignore_eos=True)
        assert isinstance(told[0], BusyError)
        assert "another thread" in told[0].message
        assert len(answer.tokens) == 3
        assert idle(engine)


def test_a_stream_that_is_closed_in_the_middle_of_a_step_is_cancelled_after_it(monkeypatch):
    """The garbage collector closes what was left half read wherever it happens to run."""
    with Engine(str(checkpoint(FAMILY)), memory="4MiB") as engine:
        forgotten = engine.stream("hello", max_tokens=100, ignore_eos=True)
        next(forgotten)
        execute = engine._core.executor.execute

        def collecting(plan: object) -> object:
            forgotten.close()
            return execute(plan)

        monkeypatch.setattr(engine._core.executor, "execute", collecting)
        [answer] = engine.generate("x", max_tokens=4, ignore_eos=True)
        assert len(answer.tokens) == 4
        assert idle(engine)


def _error_of(call):
    try:
        call("other")
    except WeftError as error:
        return error
    return None


def test_a_closed_engine_says_so_and_closing_twice_is_fine():
    engine = Engine(str(checkpoint(FAMILY)), memory="4MiB")
    engine.close()
    engine.close()
    with pytest.raises(EngineUnavailableError, match="stopped"):
        engine.generate("hello")


def test_a_model_without_a_chat_template_says_what_to_use_instead(tmp_path):
    directory = make_checkpoint(tmp_path / "plain", "lfm2")
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    with Engine(str(directory), memory="4MiB") as engine:
        assert engine.generate("a", max_tokens=1)
        with pytest.raises(RequestError, match=r"without --chat.*chat_template.jinja"):
            engine.chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"memory": "lots"}, ConfigError, "--memory 'lots' is not a size"),
        ({"memory": "1KB"}, ConfigError, "--memory"),
        ({"threads": 0}, ConfigError, "--threads"),
        ({"threads": 10**6}, ConfigError, "at most 1024"),
        ({"max_num_seqs": 0}, ConfigError, "--max-num-seqs"),
    ],
)
def test_a_config_that_cannot_work_names_the_flag(fields, error, words):
    with pytest.raises(error, match=words):
        Engine(str(checkpoint(FAMILY)), **fields)


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Engine(str(tmp_path))


def test_a_conversation_does_not_pay_for_its_beginning_twice():
    """The chat layer declares where the system prompt ends; answers are left for the next turn."""
    system = {"role": "system", "content": "You keep one slot for each running sequence. " * 24}
    fields = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    questions = [[system, {"role": "user", "content": text}] for text in ("Which key is red?", "A page? " * 30)]
    with Engine(str(checkpoint(FAMILY)), memory="8MiB") as engine:
        answers = [engine.chat(messages, **fields) for messages in questions]
        assert answers[0].cached_tokens == 0
        assert answers[1].cached_tokens > 200
        engine.flush_cache()
        assert engine.chat(questions[0], **fields).cached_tokens == 0
        list(engine.stream_chat(questions[1], **fields))
        assert engine.stats().memory.cache.hits == 2
    with Engine(str(checkpoint(FAMILY)), memory="8MiB", prefix_cache=False) as cold:
        assert [cold.chat(messages, **fields).tokens for messages in questions] == [answer.tokens for answer in answers]
        assert cold.stats().cached_tokens == 0


def test_a_wrong_way_to_keep_states_is_refused_by_its_flag():
    with pytest.raises(ConfigError, match="--snapshots is 'often'"):
        Engine(str(checkpoint(FAMILY)), memory="8MiB", snapshots="often")
