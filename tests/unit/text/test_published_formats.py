"""Each served family that has a published format: told from the words of its template or from its vocabulary, its
calls and reasoning read as its models write them. The templates are rebuilt in words of our own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from weft.text.choices import showing
from weft.text.dialect import AnswerBlock, Dialect, text_of
from weft.text.tokenizer import Tokenizer
from weft.text.tools.calling import calls_grammar
from weft.text.tools.definitions import ToolChoice, read_tools
from weft.text.tools.formats import FORMATS
from weft.text.tools.writing import calls_text

TOOLS = read_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "get-weather.v1",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string"},
                        "days": {"type": "integer"},
                        "note": {"type": ["string", "null"]},
                    },
                    "required": ["city"],
                },
            },
        },
        {"type": "function", "function": {"name": "get_time"}},
    ]
)
ARGUMENTS = {"city": 'Zürich "HB"\n<b>', "days": 3, "note": None}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
HERMES = (
    f'<tool_call>\n{{"name": "get-weather.v1", "arguments": {JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
LISTED = f'[{{"name": "get-weather.v1", "arguments": {JSON}}}, {{"name": "get_time", "arguments": {{}}}}]'
XML_BODY = (
    '<function=get-weather.v1>\n<parameter=city>\nZürich "HB"\n<b>\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
    "<parameter=note>\nnull\n</parameter>\n</function>"
)
XML = f"<tool_call>\n{XML_BODY}\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>"
XML_WORDS = "Reply with <tool_call><function=NAME><parameter=NAME>value</parameter></function></tool_call>."
SEED = (
    '<seed:tool_call>\n<function=get-weather.v1>\n<parameter=city>Zürich "HB"\n<b></parameter>\n'
    "<parameter=days>3</parameter>\n<parameter=note>null</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=get_time>\n</function>\n"
    "</seed:tool_call>"
)
DSML = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get-weather.v1">\n<｜DSML｜parameter name="city" string="true">'
    'Zürich "HB"\n<b></｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="note" string="false">null</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
GLM_WORDS = "Write <tool_call>NAME and then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each.</tool_call>"
GLM = (
    '<tool_call>get-weather.v1\n<arg_key>city</arg_key>\n<arg_value>Zürich "HB"\n<b></arg_value>\n<arg_key>days'
    "</arg_key>\n<arg_value>3</arg_value>\n<arg_key>note</arg_key>\n<arg_value>null</arg_value>\n</tool_call>\n"
    "<tool_call>get_time\n</tool_call>"
)
K3_RESPONSE = "<|open|>response<|sep|><|close|>response<|sep|>"
THINK = ("<think>\nHm, rain?\n</think>\n\n", "Hm, rain?")


@dataclass(frozen=True)
class Published:
    """``words``: the part of a template that speaks of calls and reasoning. ``thought``: what a model writes
    first, and the reasoning in it. ``calls``: how it writes the two calls."""

    words: str
    parsers: tuple[str | None, str]
    calls: str
    thought: tuple[str, str] = ("", "")
    tokens: tuple[str, ...] = ()


PYTHON = "get-weather.v1(city='Zürich \"HB\"\n<b>', days=3, note=None)"
FAMILIES = {
    "Qwen3, Qwen3-Next": Published("<think> <tool_call>\\n{name}</tool_call>", ("think", "hermes"), HERMES, THINK),
    "Seed-OSS": Published(
        f"<seed:think> {XML_WORDS.replace('tool_call', 'seed:tool_call')}",
        ("seed_oss", "seed_oss"),
        SEED,
        ("<seed:think>Hm, rain?</seed:think>", "Hm, rain?"),
    ),
    "Qwen3.5, Qwen3-Coder, Nemotron 3": Published(f"<think> {XML_WORDS}", ("think", "qwen3_xml"), XML, THINK),
    "Qwen3-Coder without the envelope": Published(
        XML_WORDS, (None, "qwen3_xml"), f"{XML_BODY}\n<function=get_time>\n</function>\n</tool_call>"
    ),
    "GLM 4.5 and later": Published(f"<think> {GLM_WORDS}", ("think", "glm"), GLM, THINK),
    "GLM 4.7, Ling 3: no line ends": Published(
        f"</think> {GLM_WORDS}",
        ("think", "glm"),
        GLM.replace("v1\n<", "v1<")
        .replace(">\n<arg", "><arg")
        .replace(">\n</tool", "></tool")
        .replace("time\n", "time"),
        ("<think>Hm, rain?</think>", "Hm, rain?"),
    ),
    "GLM-5.3-Flash: JSON after the name": Published(
        f"<think> {GLM_WORDS}",
        ("think", "glm"),
        f"<tool_call>get-weather.v1>{JSON}</tool_call><tool_call>get_time</tool_call>",
        THINK,
    ),
    "LFM2": Published(
        "List: <|tool_list_start|>[]<|tool_list_end|>",
        (None, "lfm2"),
        f"<|tool_call_start|>[{PYTHON}, get_time()]<|tool_call_end|>",
    ),
    "LFM2.5, whose template writes no marker": Published(
        "List of tools: {{ tools }}",
        ("think", "lfm2"),
        f"<|tool_call_start|>[{PYTHON}, get_time()]<|tool_call_end|>",
        ("<think>Hm, rain?</think>", "Hm, rain?"),
        ("<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>"),
    ),
    "OLMo 3": Published(
        "<functions></functions> <function_calls></function_calls>",
        (None, "olmo3"),
        f"<function_calls>\n{PYTHON}\nget_time()\n</function_calls>",
    ),
    "Gemma 4": Published(
        "<|channel>thought\\n<channel|> <|tool_call>call:NAME{}<tool_call|>",
        ("gemma4", "gemma4"),
        '<|tool_call>call:get-weather.v1{city:<|"|>Zürich "HB"\n<b><|"|>,days:3,note:null}<tool_call|>'
        "<|tool_call>call:get_time{}<tool_call|>",
        ("<|channel>thought\nHm, rain?<channel|>", "Hm, rain?"),
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "FunctionGemma (Gemma 3)": Published(
        "<start_function_call>call:NAME{}<end_function_call>",
        (None, "functiongemma"),
        '<start_function_call>call:get-weather.v1{city:<escape>Zürich "HB"\n<b><escape>,days:3,note:None}'
        "<end_function_call><start_function_call>call:get_time{}<end_function_call>",
    ),
    "gpt-oss": Published(
        "<|start|>assistant<|channel|>analysis<|message|>",
        ("harmony", "harmony"),
        f"<|channel|>commentary to=functions.get-weather.v1 <|constrain|>json<|message|>{JSON}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_time<|message|>{}<|call|>",
        ("<|channel|>analysis<|message|>Hm, rain?<|end|><|start|>assistant", "Hm, rain?"),
    ),
    "Inkling": Published(
        "<|message_model|><|content_thinking|> <|content_text|> <|content_invoke_tool_json|>",
        ("inkling", "inkling"),
        f'get-weather.v1<|content_invoke_tool_json|>{{"name": "get-weather.v1", "args": {JSON}}}<|end_message|>'
        '<|message_model|><|content_invoke_tool_json|>{"args": {}, "name": "get_time"}<|end_message|>'
        "<|content_model_end_sampling|>",
        ("<|content_thinking|>Hm, rain?<|end_message|><|message_model|>", "Hm, rain?"),
    ),
    "Granite 4, Falcon-H1, Ling and Ring 2.5": Published(
        "Reply inside <tool_call></tool_call> tags.", (None, "hermes"), HERMES
    ),
    "Granite 3": Published("Begin with <|tool_call|>.", (None, "granite"), f"<|tool_call|>{LISTED}"),
    "Nemotron-H, Nano 2": Published(
        "</think> <TOOLCALL>[]</TOOLCALL>", ("think", "nemotron"), f"<TOOLCALL>{LISTED}</TOOLCALL>", THINK
    ),
    "Jamba": Published("<tool_calls>[]</tool_calls>", (None, "jamba"), f"<tool_calls>\n{LISTED}\n</tool_calls>"),
    "MiniMax M1: objects by line": Published(
        "<think> respond with <tool_calls></tool_calls>",
        ("think", "jamba"),
        f"<tool_calls>\n{LISTED[1:-1].replace('}, {', chr(125) + chr(10) + '{')}\n</tool_calls>",
        THINK,
    ),
    "MiniMax-Text-01": Published(
        "<function_call>```typescript",
        (None, "minimax"),
        f"<function_call>```typescript\nfunctions.get-weather.v1({JSON})\nfunctions.get_time({{}})\n```",
    ),
    "Kimi-Linear, Kimi K2": Published(
        "<|tool_calls_section_begin|>",
        (None, "kimi"),
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get-weather.v1:0<|tool_call_argument_begin|>{JSON}"
        "<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    "Kimi K3": Published(
        "'<|open|>' + tag, '<|close|>' + tag, '<|sep|>'",
        ("kimi_k3", "kimi_k3"),
        f"{K3_RESPONSE}<|open|>tools<|sep|>"
        '<|open|>call tool="get-weather.v1" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>'
        'Zürich "HB"\n<b><|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument'
        "<|sep|>"
        '<|open|>argument key="note" type="null"<|sep|>null<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="get_time" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
        ("<|open|>think<|sep|>Hm, rain?<|close|>think<|sep|>", "Hm, rain?"),
        ("<|open|>", "<|close|>", "<|sep|>"),
    ),
    "PLaMo 3": Published(
        "<|plamo:begin_think:plamo|> <|plamo:begin_tool_requests:plamo|>",
        ("plamo3", "plamo3"),
        "<|plamo:begin_tool_requests:plamo|>"
        + "".join(
            f"<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
            f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{given}"
            "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
            for name, given in (("get-weather.v1", JSON), ("get_time", "{}"))
        )
        + "<|plamo:end_tool_requests:plamo|>",
        ("<|plamo:begin_think:plamo|>Hm, rain?<|plamo:end_think:plamo|>", "Hm, rain?"),
    ),
    "GigaChat 3.5": Published("<think> ｜GCML｜", ("think", "gigachat"), DSML.replace("DSML", "GCML"), THINK),
    "DeepSeek V3.2": Published(
        "<think> <｜DSML｜function_calls>",
        ("think", "deepseek_v32"),
        DSML.replace("tool_calls", "function_calls"),
        THINK,
    ),
    "DeepSeek V4": Published(
        "<think> <｜DSML｜tool_calls>", ("think", "deepseek_v4"), DSML, THINK, ("<think>", "</think>", "｜DSML｜")
    ),
    "MiniMax-M2": Published(
        "<think> <minimax:tool_call>",
        ("think", "minimax_m2"),
        '<minimax:tool_call>\n<invoke name="get-weather.v1">\n<parameter name="city">Zürich "HB"\n<b></parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="note">null</parameter>\n</invoke>\n'
        '<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
        THINK,
    ),
    "MiniMax-M3": Published(
        "<mm:think> {%- set ns = ']<]minimax[>[' -%} {%- set begin = ns ~ '<tool_call>' -%}",
        ("minimax_m3", "minimax_m3"),
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get-weather.v1">]<]minimax[>[<city>Zürich "HB"\n<b>'
        "]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[<note>null]<]minimax[>[</note>"
        "]<]minimax[>[</invoke>\n"
        ']<]minimax[>[<invoke name="get_time">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
        ("<mm:think>Hm, rain?</mm:think>", "Hm, rain?"),
        ("]<]minimax[>[", "<tool_call>", "</tool_call>", "<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "DeepSeek V3, R1": Published(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{type}<｜tool▁sep｜>{name}\n```json\n</think>",
        ("think", "deepseek_v3"),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get-weather.v1\n```json\n{JSON}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        THINK,
    ),
    "DeepSeek V3.1": Published(
        "<think> <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        ("think", "deepseek_v31"),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get-weather.v1<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        THINK,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    "Command R7B, Command A": Published(
        "<|START_THINKING|> <|START_ACTION|>",
        ("cohere", "cohere"),
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get-weather.v1", "parameters": {JSON}}},\n'
        '    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>',
        ("<|START_THINKING|>Hm, rain?<|END_THINKING|>", "Hm, rain?"),
    ),
    "Apertus": Published(
        "<|inner_prefix|> <|tools_prefix|>",
        ("apertus", "apertus"),
        f'<|tools_prefix|>[{{"get-weather.v1": {JSON}}}, {{"get_time": {{}}}}]<|tools_suffix|>',
        ("<|inner_prefix|>Hm, rain?<|inner_suffix|>", "Hm, rain?"),
    ),
    "GLM-4-0414, GLM-4": Published(
        "请使用 Json 格式表示调用的参数。", (None, "glm4"), f"\nget-weather.v1\n{JSON}\nget_time \n{{}}"
    ),
    "GLM-Z1-0414": Published(
        "<think> 请使用 Json 格式表示调用的参数。",
        ("think", "glm4"),
        f"get-weather.v1 \n{JSON}\nget_time\n{{}}",
        ("<think>\nHm, rain?\n</think>\n", "Hm, rain?"),
    ),
    "Mistral, Ministral": Published(
        "[TOOL_CALLS] [THINK]",
        ("mistral", "mistral"),
        f"[TOOL_CALLS]{LISTED}",
        ("[THINK]Hm, rain?[/THINK]", "Hm, rain?"),
    ),
    "Mistral, v11 and later": Published(
        "[TOOL_CALLS] [ARGS]",
        (None, "mistral"),
        f"[TOOL_CALLS]get-weather.v1[CALL_ID]123456789[ARGS]{JSON}[TOOL_CALLS]get_time[ARGS]{{}}",
    ),
    "Llama 3": Published(
        "<|python_tag|>",
        (None, "llama3_json"),
        f'{{"type": "function", "name": "get-weather.v1", "parameters": {JSON}}}; '
        '{"name": "get_time", "parameters": {}}',
    ),
    "Llama 3.1, custom functions": Published(
        "<|python_tag|>",
        (None, "llama3_json"),
        f"<function=get-weather.v1>{JSON}</function><function=get_time>{{}}</function>",
    ),
    "ZAYA1": Published(
        "<think> <zyphra_tool_call>", ("think", "zaya"), XML.replace("tool_call", "zyphra_tool_call"), THINK
    ),
}


def tokenizer_with(tokens: tuple[str, ...]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(tokens))
    return Tokenizer(made, decoder={"type": "ByteLevel"})


@dataclass
class Words:
    source: str
    reads_tools: bool = True


def dialect_of(family: Published) -> Dialect:
    return Dialect(Words(f"{{% for tool in tools %}}{family.words}{{% endfor %}}"), tokenizer_with(family.tokens))


def blocks_of(family: Published, text: str, step: int, *, eager: bool) -> list[AnswerBlock]:
    reader = dialect_of(family).plan("<|x|>", tools=TOOLS, choice=ToolChoice("auto")).reader(eager=eager)
    for at in range(0, len(text), step):
        reader.read(text[at : at + step], [1], None)
    reader.read("", [], "stop")
    return reader.blocks


def calls_of(blocks: list[AnswerBlock]) -> list[tuple[str, Any]]:
    return [(block.name, json.loads(block.text)) for block in blocks if block.is_call]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_of_a_family_is_told_from_its_template_or_its_vocabulary(name: str) -> None:
    family = FAMILIES[name]
    found = dialect_of(family)
    assert (found.reasoning and found.reasoning.name, found.tools and found.tools.name) == family.parsers


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_and_reasoning_are_read_as_the_models_of_a_family_write_them(name: str) -> None:
    family = FAMILIES[name]
    thought, reasoning = family.thought
    for step in (1, 3, 11, 10_000):
        for eager in (False, True):
            blocks = blocks_of(family, thought + family.calls, step, eager=eager)
            assert text_of(blocks, "reasoning") == reasoning
            assert text_of(blocks, "text").strip() == ""
            assert calls_of(blocks) == [("get-weather.v1", ARGUMENTS), ("get_time", {})]


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_the_vocabulary_tells_a_format_where_the_template_does_not(row: Any) -> None:
    silent = Words("{{ tools }}")
    found = Dialect(silent, tokenizer_with(row.tokens), reasoning_parser="none")
    assert (found.tools and found.tools.name) == (row.name if row.tokens else None)
    assert Dialect(silent, tokenizer_with(())).tools is None
    assert Dialect(Words("{{ tools }} <TOOLCALL>"), tokenizer_with(row.tokens)).tools is next(
        row for row in FORMATS if row.name == "nemotron"
    )


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_every_format_has_readers_grammar_and_detection(row: Any) -> None:
    assert row.signs
    grammar = calls_grammar(row, TOOLS, several=True, token_of=lambda text: None, field="tools")
    assert "get-weather.v1" in grammar.grammar
    assert any(family.parsers[1] == row.name for family in FAMILIES.values())


def test_markers_of_gemma_that_are_special_tokens_stay_in_the_text() -> None:
    family = FAMILIES["Gemma 4"]
    text = tokenizer_with(family.tokens)
    plan = dialect_of(family).plan("", tools=TOOLS, choice=ToolChoice("auto"))
    answer = family.thought[0] + family.calls
    assert showing(text, plan.shown_ids).decode(text.encode(answer)) == answer


def test_markers_inside_a_head_stay_in_the_text() -> None:
    for family in (FAMILIES["DeepSeek V3.1"], FAMILIES["MiniMax-M3"]):
        text = tokenizer_with(family.tokens)
        plan = dialect_of(family).plan("", tools=TOOLS, choice=ToolChoice("auto"))
        assert showing(text, plan.shown_ids).decode(text.encode(family.calls)) == family.calls
    [row] = [row for row in FORMATS if row.name == "deepseek_v3"]
    assert {"<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"} <= set(row.markers)


def test_calls_are_written_as_they_are_read() -> None:
    functions = [
        {"function": {"name": name, "arguments": given}} for name, given in (("get_time", {}), ("f", {"x": "y"}))
    ]
    written = {row.name: calls_text(row, functions) for row in FORMATS}
    assert written["cohere"] == (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_time", "parameters": {}},\n'
        '    {"tool_call_id": "1", "tool_name": "f", "parameters": {"x": "y"}}\n]<|END_ACTION|>'
    )
    assert written["apertus"] == '<|tools_prefix|>[{"get_time": {}}, {"f": {"x": "y"}}]<|tools_suffix|>'
    assert '<invoke name="f">\n<parameter name="x">y</parameter>\n</invoke>' in written["minimax_m2"]
    assert written["minimax_m3"] == (
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_time">]<]minimax[>[</invoke>\n'
        ']<]minimax[>[<invoke name="f">]<]minimax[>[<x>y]<]minimax[>[</x>]<]minimax[>[</invoke>\n'
        "]<]minimax[>[</tool_call>"
    )
    assert 'function<｜tool▁sep｜>f\n```json\n{"x": "y"}\n```<｜tool▁call▁end｜>' in written["deepseek_v3"]


def test_gemma_reasons_again_after_some_content() -> None:
    family = FAMILIES["Gemma 4"]
    answer = "<|channel>thought\n<channel|>I look.<|channel>thought\nand so<channel|>" + family.calls
    for step in (1, 10_000):
        blocks = blocks_of(family, answer, step, eager=True)
        assert [block.kind for block in blocks] == ["text", "reasoning", "call", "call"]
        assert [block.text for block in blocks[:2]] == ["I look.", "and so"]


@pytest.mark.parametrize(
    "text", ["\nHere it is:\n{}", "get_timeless\n{}", "get_time", "get_time\nis {}", "get_time\n{]"]
)
def test_a_line_that_is_not_the_name_of_an_offered_tool_is_text_and_no_character_is_lost(text: str) -> None:
    family = FAMILIES["GLM-4-0414, GLM-4"]
    for step in (1, 4, 100):
        blocks = blocks_of(family, text, step, eager=True)
        assert not calls_of(blocks)
        assert text_of(blocks, "text") == text
