"""Texts of public reports about other engines, with words of our own where the report has private ones. Each was tried
on these readers once it was read, and mended where it was wrong; content stays content by a rule of docs/chat.md."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.text.test_forty_texts import read
from tests.unit.text.test_published_formats import Words, tokenizer_with
from tests.unit.text.test_spoiled_calls import TOOLS, read_every_way
from weft.text.channels import FORMATS, MessageReader, Thought
from weft.text.dialect import Dialect
from weft.text.tools.definitions import ToolChoice
from weft.text.tools.formats import FORMATS as FORMATS_OF_CALLS
from weft.text.tools.formats import ToolFormat
from weft.text.tools.json_calls import HELD_CHARS
from weft.text.tools.reader import ToolCallReader

Calls = list[tuple[str, Any]]
FS = "mcp.fs-write_v2"

REPORTED: list[tuple[str, str, str, Calls | None]] = [
    (
        "vllm 55495: a parameter without a name is content, not half an object",
        "qwen3_xml",
        "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=\nb\n</parameter>\n</function>\n"
        "</tool_call>",
        None,
    ),
    (
        "vllm 55495: a parameter's tag without its end",
        "qwen3_xml",
        '<tool_call>\n<function=write>\n<parameter=tags: ["a"]\n</parameter>\n</function>\n</tool_call>',
        None,
    ),
    (
        "vllm 43713: two functions in one envelope",
        "qwen3_xml",
        "<tool_call>\n<function=class>\n</function>\n<function=write>\n<parameter=path>\na\n</parameter>\n</function>\n"
        "</tool_call>",
        [("class", {}), ("write", {"path": "a"})],
    ),
    (
        "club-3090 1191: prose with a literal marker is not cut",
        "qwen3_xml",
        'The literal token "<tool_call>" says that a call begins. Then comes its name.',
        None,
    ),
    (
        "yzma 243: Gemma leaves a comma out",
        "gemma4",
        '<|tool_call>call:write{path:<|"|>look<|"|>size:90,tags:[<|"|>a<|"|><|"|>b<|"|>]}<tool_call|>',
        [("write", {"path": "look", "size": 90, "tags": ["a", "b"]})],
    ),
    (
        "omlx 1830: Gemma writes namespaces and single quotes",
        "gemma4",
        "<|tool_call>call:google:mcp:text:write{path: 'a, {1}.pdf', content: \"b: c\", mode: 'it\\'s'}<tool_call|>",
        [("write", {"path": "a, {1}.pdf", "content": "b: c", "mode": "it's"})],
    ),
    (
        "omlx 1846: Gemma writes parentheses",
        "gemma4",
        f'<|tool_call>call:{FS}(path=<|"|>a)b<|"|>, size=3, opts={{a:(b)}})<tool_call|>',
        [(FS, {"path": "a)b", "size": 3, "opts": {"a": "(b)"}})],
    ),
    (
        "ollama 15315: Gemma writes bare keys of any kind",
        "gemma4",
        '<|tool_call>call:write{opts:{terms:{field:<|"|>ip.keyword<|"|>,@timestamp:1}}}<tool_call|>',
        [("write", {"opts": {"terms": {"field": "ip.keyword", "@timestamp": 1}}})],
    ),
    (
        "ollama 15241: Gemma's texts have quotes inside",
        "gemma4",
        '<|tool_call>call:write{content:<|"|>echo "$(ls \'x\')" | grep {a}<|"|>}<tool_call|>',
        [("write", {"content": "echo \"$(ls 'x')\" | grep {a}"})],
    ),
    (
        "vllm 49248: GLM leaves out the tag before a value",
        "glm",
        "<tool_call>write<arg_key>path</arg_key>how many days</arg_value><arg_key>flag</arg_key><arg_value>true"
        "</arg_value></tool_call>",
        [("write", {"path": "how many days", "flag": True})],
    ),
    ("vllm 48131: GLM calls without arguments", "glm", "<tool_call>class</tool_call>", [("class", {})]),
    (
        "sglang, GLM-5.3-Flash: a display name before the tool's",
        "glm",
        '<tool_call>Files/write>{"path": "a"}',
        [("write", {"path": "a"})],
    ),
    (
        "ollama 17274: a name that no tool has is passed on",
        "hermes",
        '<tool_call>\n{"name": "Apply tags", "arguments": {"tags": ["a"]}}\n</tool_call>',
        [("Apply tags", {"tags": ["a"]})],
    ),
    (
        "mlx-lm 899: a regex and a path whose backslashes escape nothing",
        "hermes",
        r'<tool_call>{"name": "write", "arguments": '
        r'{"path": "C:\\new\users", "content": "\d+ \u00e9 \" \/"}}</tool_call>',
        [("write", {"path": "C:\\new\\users", "content": '\\d+ é " /'})],
    ),
    (
        "mlx-lm 899, the arguments first",
        "hermes",
        r'<tool_call>{"arguments": {"path": "\d+"}, "name": "write"}</tool_call>',
        [("write", {"path": "\\d+"})],
    ),
    (
        "a backslash before a raw line end",
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"content": "a \\\nb"}}</tool_call>',
        [("write", {"content": "a \\\nb"})],
    ),
    (
        "vllm 5649: Mistral writes Python",
        "mistral",
        "[TOOL_CALLS] [{'name': 'write', 'arguments': {'path': 'a', 'flag': True, 'mode': None}}]",
        [("write", {"path": "a", "flag": True, "mode": None})],
    ),
    (
        "vllm 38441: a line end after Kimi's name",
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.class:0\n<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        [("class", {})],
    ),
    (
        "vllm 45167: a literal end marker in a text",
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"content": "echo </tool_call> so"}}</tool_call>',
        [("write", {"content": "echo </tool_call> so"})],
    ),
    (
        "mlx-lm 1796: a single-quoted text with commas",
        "lfm2",
        "<|tool_call_start|>[write(path='/tmp/a.py', content='# Hello, world!\nx = [1, 2]')]<|tool_call_end|>",
        [("write", {"path": "/tmp/a.py", "content": "# Hello, world!\nx = [1, 2]"})],
    ),
    (
        "vllm-mlx 63, mlx-lm 912: Python in parameters of tags",
        "qwen3_xml",
        "<tool_call><function=write><parameter=tags>['a', 'b']</parameter><parameter=opts>{'a': True}</parameter>"
        "</function></tool_call>",
        [("write", {"tags": ["a", "b"], "opts": {"a": True}})],
    ),
    (
        "lmstudio 1979: LFM2.5 in its own markers",
        "lfm2",
        '<|tool_call_start|>[write(path="desktop")]<|tool_call_end|>',
        [("write", {"path": "desktop"})],
    ),
    (
        "llama.cpp 26658: LFM2.5 writes code with escaped quotes, which a cut divides",
        "lfm2",
        r"<|tool_call_start|>[write(content='plt.plot(x, y, \'red\', label=\'c\')\nplt.show()')]<|tool_call_end|>",
        [("write", {"content": "plt.plot(x, y, 'red', label='c')\nplt.show()"})],
    ),
    (
        "llama.cpp 24667: an escaped line end is not escaped twice",
        "lfm2",
        r"""<|tool_call_start|>[write(content="print('hello')\nprint('world')")]<|tool_call_end|>""",
        [("write", {"content": "print('hello')\nprint('world')"})],
    ),
    (
        "tabbyAPI 464: keywords for names, whole numbers with zeros in front",
        "lfm2",
        "<|tool_call_start|>[write(import='x', max-n.x=007)]<|tool_call_end|>",
        [("write", {"import": "x", "max-n.x": 7})],
    ),
    (
        "llama.cpp 21242: dotted names, and lists and objects inside each other",
        "lfm2",
        "<|tool_call_start|>[mcp.fs-write_v2(opts={'to': [{'name': 'A, B'}], 'cc': []}, tags=['x'])]<|tool_call_end|>",
        [(FS, {"opts": {"to": [{"name": "A, B"}], "cc": []}, "tags": ["x"]})],
    ),
    (
        "vllm 30722: a list of calls without its last bracket",
        "lfm2",
        "<|tool_call_start|>[write(path='a', tags=['x', 'y'])<|tool_call_end|>",
        [("write", {"path": "a", "tags": ["x", "y"]})],
    ),
    (
        "model_server 4487: names in quotes, and types by the names inside",
        "qwen3_xml",
        '<tool_call>\n<function="write">\n<parameter="path">\n7\n</parameter>\n<parameter=\'max-n.x\'>\n7\n</parameter>\n'
        "</function>\n</tool_call>",
        [("write", {"path": "7", "max-n.x": 7})],
    ),
    (
        "hermes-agent 1796: a comma before each end",
        "hermes",
        '<tool_call>\n{"name": "write", "arguments": {"tags": ["a", "b", ],\n "path": "c, }",\n}}\n</tool_call>',
        [("write", {"tags": ["a", "b"], "path": "c, }"})],
    ),
    (
        "vllm-mlx 63: constants of Python in JSON, beside a raw line end",
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"flag": True, "mode": None, "content": "None\nof it"}}</tool_call>',
        [("write", {"flag": True, "mode": None, "content": "None\nof it"})],
    ),
    (
        "vllm-mlx 63: values of Python in JSON",
        "hermes",
        '<tool_call>\n{"name": "write", "arguments": {"opts": {\'a\': "True, b"}, "size": 1_000}}\n</tool_call>',
        [("write", {"opts": {"a": "True, b"}, "size": 1000})],
    ),
    (
        "vllm-mlx 63, of Mistral",
        "mistral",
        '[TOOL_CALLS]write[ARGS]{"flag": False, "tags": ["a",],}',
        [("write", {"flag": False, "tags": ["a"]})],
    ),
    (
        "smg 2490: a bracket in a text, and ends that are missing",
        "qwen3_xml",
        "<tool_call><function=write><parameter=path>echo '}'</parameter></function></tool_call>"
        "<tool_call><function=write><parameter=path>b</parameter>",
        [("write", {"path": "echo '}'"}), ("write", {"path": "b"})],
    ),
]


@pytest.mark.parametrize(("name", "text", "calls"), [case[1:] for case in REPORTED], ids=[case[0] for case in REPORTED])
def test_a_reported_text_is_read_right(name: str, text: str, calls: Calls | None) -> None:
    content, written = read_every_way(name, text)
    assert content == (text if calls is None else "")
    assert [(called, json.loads(arguments)) for called, arguments in written] == (calls or [])


HARMONY_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
MESSAGES: list[tuple[str, int, str, list[tuple[str, Any]]]] = [
    (
        "ollama 17638: gpt-oss ends an object with a bracket too many",
        0,
        HARMONY_CALL + '{"input": "*** Begin\\n-a"}]<|call|>',
        [("call", {"input": "*** Begin\n-a"})],
    ),
    ("ollama 17638: an object in a list", 0, HARMONY_CALL + '[{"input": "a"}]<|call|>', [("call", {"input": "a"})]),
    (
        "ollama 12884: raw line ends in a text",
        0,
        HARMONY_CALL + '{"content": "/**\n * a\n */"}<|call|>',
        [("call", {"content": "/**\n * a\n */"})],
    ),
    ("continue 10221: arguments that are no JSON are text", 0, HARMONY_CALL + "ls -R\n", [("text", "ls -R\n")]),
    (
        "imp 1716: a call that the end of the answer ends",
        0,
        "<|channel|>analysis<|message|>Use it.<|end|><|start|>assistant" + HARMONY_CALL + '{"city":"Berlin"}',
        [("thought", "Use it."), ("call", {"city": "Berlin"})],
    ),
    (
        "sglang 33181: the name of a call that opens the answer is no content",
        1,
        'f<|content_invoke_tool_json|>{"name": "f", "args": {}}<|end_message|>',
        [("call", {})],
    ),
    ("vllm 49876: a bare answer of Inkling", 1, "just_so", [("text", "just_so")]),
]


@pytest.mark.parametrize(("row", "text", "parts"), [case[1:] for case in MESSAGES], ids=[case[0] for case in MESSAGES])
def test_reported_messages_are_read_right(row: int, text: str, parts: list[tuple[str, Any]]) -> None:
    for step in (1, 5, len(text)):
        reader = MessageReader(FORMATS[row], None, takes_calls=True, thinks=True, single=False, eager=True)
        read: list[list[str]] = []
        pieces = [text[at : at + step] for at in range(0, len(text), step)]
        for part in [*(part for piece in pieces for part in reader.push(piece)), *reader.finish(is_cut=False)]:
            kind = "thought" if isinstance(part, Thought) else "text" if isinstance(part, str) else "call"
            more = part.text if isinstance(part, Thought) else part if isinstance(part, str) else part.arguments
            if read and read[-1][0] == kind:
                read[-1][1] += more
            else:
                read.append([kind, more])
        assert [(kind, json.loads(found) if kind == "call" else found) for kind, found in read] == parts


def test_a_long_call_of_messages_has_valid_arguments_with_a_bracket_too_many() -> None:
    long = "x\n" * HELD_CHARS
    reader = MessageReader(FORMATS[0], None, takes_calls=True, thinks=True, single=False, eager=True)
    text = HARMONY_CALL + f'{{"input": "{long}"}}]}}<|call|>'
    given = [part for at in range(0, len(text), 7) for part in reader.push(text[at : at + 7])]
    assert len(given) > 5
    arguments = "".join(part.arguments for part in given if not isinstance(part, (str, Thought)))
    assert json.loads(arguments) == {"input": long}


def test_text_after_a_call_of_mistral_is_content() -> None:  # mlx-lm 1448
    content, [(name, arguments)] = read_every_way("mistral", '[TOOL_CALLS]write[ARGS]{"path": "a"}\n\nI look.')
    assert (content, name, json.loads(arguments)) == ("\n\nI look.", "write", {"path": "a"})


@pytest.mark.parametrize("thought", ["The format is <tool_call><function=x>, so I use it.", "Perhaps `<tool_call>`?"])
def test_markers_that_a_reasoning_mentions_call_nothing(thought: str) -> None:  # lmstudio 1592
    plan = Dialect(Words("{{ tools }} <think> <tool_call><function=f><parameter=x>"), tokenizer_with(())).plan(
        "<think>\n", tools=TOOLS, choice=ToolChoice("auto")
    )
    reader = plan.reader(eager=True)
    for character in f"{thought}\n</think>\n\nNo call.":
        reader.read(character, [1], None)
    reader.read("", [], "stop")
    assert [(block.kind, block.text) for block in reader.blocks] == [("reasoning", thought), ("text", "No call.")]


def test_a_call_in_a_reasoning_that_ends_after_it_is_a_call() -> None:  # mlx-openai-server 284
    plan = Dialect(Words("{{ tools }} <think> <tool_call><function=f><parameter=x>"), tokenizer_with(())).plan(
        "", tools=TOOLS, choice=ToolChoice("auto")
    )
    reader = plan.reader(eager=True)
    call = "<tool_call>\n<function=write>\n<parameter=path>\n/tmp/a\n</parameter>\n</function>\n</tool_call>"
    reader.read(f"<think>\nI read it.\n{call}\n</think>\n", [1], "stop")
    assert [(block.kind, block.name, block.text) for block in reader.blocks] == [
        ("reasoning", "", "I read it."),
        ("call", "write", '{"path": "/tmp/a"}'),
    ]


def test_a_call_after_a_reasoning_that_never_ends_is_a_call() -> None:  # ollama 13764, Nemotron 3
    plan = Dialect(Words("{{ tools }} <think> <tool_call><function=f><parameter=x>"), tokenizer_with(())).plan(
        "<think>\n", tools=TOOLS, choice=ToolChoice("auto")
    )
    reader = plan.reader(eager=True)
    for (
        character
    ) in "I look.\n<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>":
        reader.read(character, [1], None)
    reader.read("", [], "stop")
    assert [(block.kind, block.text.strip()) for block in reader.blocks] == [
        ("reasoning", "I look."),
        ("call", '{"path": "a"}'),
    ]


@pytest.mark.parametrize("arguments", ['{"path": "a", "opts": {"b": [1, true]}', '{"flag": true', '{"size": 3.5'])
def test_a_call_of_gpt_oss_may_lack_its_last_brace(arguments: str) -> None:  # lmstudio 942
    harmony = next(row for row in FORMATS_OF_CALLS if row.name == "harmony")
    header = "<|channel|>commentary to=functions.write<|constrain|>json<|message|>"
    text = f"{header}{arguments}<|call|>"
    for step in (1, 7, len(text)):
        [block] = read(harmony, text, step, eager=True)
        assert (block.kind, block.name, json.loads(block.text)) == ("call", "write", json.loads(arguments + "}"))


@pytest.mark.parametrize("row", FORMATS_OF_CALLS, ids=lambda row: row.name)
def test_a_stream_goes_on_after_a_marker_that_prose_mentions(row: ToolFormat) -> None:  # club-3090 72
    for marker in row.opens:
        text = f"So {marker} opens a call. " + "More words follow it. " * 40
        reader = ToolCallReader(row, TOOLS, eager=True)
        sent = longest = 0
        for at, character in enumerate(text):
            parts = reader.push(character)
            longest = max(longest, at - sent)
            sent = at if parts else sent
        assert longest < 64, marker


@pytest.mark.parametrize("eager", [False, True])
def test_an_answer_that_its_limit_cuts_says_so_with_calls_too(eager: bool) -> None:  # vllm 58228, 53269
    """The whole call counts, the cut one is content or a part of a call, and the reason is the limit."""
    plan = Dialect(Words("{{ tools }} <tool_call>"), tokenizer_with(())).plan(
        "", tools=TOOLS, choice=ToolChoice("auto")
    )
    whole = '<tool_call>\n{"name": "class", "arguments": {}}\n</tool_call>\n'
    for cut in ("ab", "ab" * HELD_CHARS):
        reader = plan.reader(eager=eager)
        reader.read(f'{whole}<tool_call>\n{{"name": "write", "arguments": {{"path": "{cut}', [1], "length")
        assert [block.name for block in reader.blocks if block.is_call and block.is_complete] == ["class"]
        assert reader.finish_reason("length") == "length"


def test_escapes_that_json_does_not_have_reach_a_stream_as_json() -> None:  # pi 9643
    written = "x" * 2 * HELD_CHARS + "\n\t\\U0001F600 \\`a\\` \\x41"
    text = f'<tool_call>\n{{"name": "write", "arguments": {{"content": "{written}"}}}}\n</tool_call>'
    content, [(_, arguments)] = read_every_way("hermes", text)
    assert (content, json.loads(arguments)) == ("", {"content": written})
