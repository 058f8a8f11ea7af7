"""Clients of other projects, each used as its own documentation says, by a base URL and any key.

    clients.py names | packages CLIENT | check CLIENT URL

``check`` prints rows of a table, one for each API, and the reason of each failure on stderr. The
model behind URL is the embedded one: it answers from a list, calls a tool and writes JSON. So a client that
garbles a request or an answer gets another result.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = Path(__file__).resolve().parents[2] / "src" / "weft" / "embedded" / "weft-recall"
"""lm-eval counts tokens itself where it scores choices."""
QUESTION = "Remember this list.\nOshan: 7750\nWhat is the number of Oshan?"
ANSWER = "7750"
UMBRELLA = "Do I need an umbrella in Paris?"
CITY = "Paris"
WEATHER = {"temperature": 18, "sky": "clear"}
REPORT = "clear"
"""A word of the answer that has read ``WEATHER``."""
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": PARAMETERS},
}
FACT = "Ada is 36 years old."
PERSON = {"name": "Ada", "age": 36}
PERSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ROWS_LEAST = 40
"""Of the picture that is sent."""
APIS = ("chat", "responses", "anthropic")
"""The first word of a check that a client runs over each of them."""
Check = Callable[[], object]
Checks = dict[str, Check]


def has(text: object, wanted: str) -> str:
    assert wanted in str(text), f"the answer is {text!r}"
    return str(text).strip()


def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city == CITY, city
    return json.dumps(WEATHER)


def litellm_checks(url: str) -> Checks:
    import litellm

    litellm.suppress_debug_info = True
    shared = {"model": "openai/default", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}

    def ask(text: str, **more: Any) -> Any:
        return litellm.completion(**shared, messages=[{"role": "user", "content": text}], **more)

    def completion() -> None:
        has(ask(QUESTION).choices[0].message.content, ANSWER)

    def stream() -> None:
        has("".join(chunk.choices[0].delta.content or "" for chunk in ask(QUESTION, stream=True)), ANSWER)

    def tools() -> None:
        [call] = ask(UMBRELLA, tools=[TOOL]).choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": CITY}, call

    def streamed_tools() -> None:
        chunks = list(ask(UMBRELLA, tools=[TOOL], stream=True))
        [call] = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": CITY}, call

    def structured() -> None:
        form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON_SCHEMA}}
        assert json.loads(ask(FACT, response_format=form).choices[0].message.content) == PERSON

    def responses() -> None:
        answer = litellm.responses(**shared, input=QUESTION)
        has(answer.output[-1].content[0].text, ANSWER)

    def messages() -> None:
        answer = litellm.completion(
            model="anthropic/default",
            api_base=url,
            api_key="none",
            temperature=0,
            max_tokens=24,
            messages=[{"role": "user", "content": QUESTION}],
        )
        has(answer.choices[0].message.content, ANSWER)

    def text_completion() -> None:
        answer = litellm.text_completion(
            model="text-completion-openai/default", api_base=f"{url}/v1", api_key="none", prompt="Hello", max_tokens=4
        )
        assert answer.usage.completion_tokens == 4, answer

    return {
        "completion": completion,
        "stream": stream,
        "tools": tools,
        "streamed tools": streamed_tools,
        "structured output": structured,
        "responses": responses,
        "anthropic messages": messages,
        "text_completion": text_completion,
    }


def langchain_checks(url: str) -> Checks:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI, OpenAI

    shared: dict[str, Any] = {"model": "default", "api_key": "none", "temperature": 0, "max_tokens": 64}
    chat = ChatOpenAI(base_url=f"{url}/v1", **shared)
    over_responses = ChatOpenAI(base_url=f"{url}/v1", use_responses_api=True, **shared)
    claude = ChatAnthropic(base_url=url, **shared)
    models = {"chat": chat, "responses": over_responses, "anthropic": claude}

    def text(message: Any) -> str:
        return str(message.text() if callable(message.text) else message.text)

    def invoke(model: Any) -> Check:
        return lambda: has(text(model.invoke(QUESTION)), ANSWER)

    def stream(model: Any) -> Check:
        return lambda: has("".join(map(text, model.stream(QUESTION))), ANSWER)

    def tools(model: Any) -> Check:
        def check() -> None:
            bound = model.bind_tools([TOOL])
            turns: list[Any] = [HumanMessage(UMBRELLA)]
            turns.append(bound.invoke(turns))
            [call] = turns[-1].tool_calls
            turns.append(ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]))
            has(text(bound.invoke(turns)), REPORT)

        return check

    def structured(model: Any, **more: Any) -> Check:
        def check() -> None:
            schema = {"title": "Person", "description": "A person.", **PERSON_SCHEMA}
            assert model.with_structured_output(schema, **more).invoke(FACT) == PERSON

        return check

    def batch() -> None:
        assert all(ANSWER in text(one) for one in chat.batch([QUESTION] * 3))

    def completions() -> None:
        assert OpenAI(base_url=f"{url}/v1", **shared).invoke("Hello")

    checks: Checks = {"batch": batch, "completions": completions}
    for name, model in models.items():
        checks |= {f"{name} invoke": invoke(model), f"{name} stream": stream(model), f"{name} tools": tools(model)}
    return checks | {
        "chat structured output": structured(chat, method="json_schema"),
        "responses structured output": structured(over_responses, method="json_schema"),
    }


def llama_index_checks(url: str) -> Checks:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike
    from pydantic import BaseModel

    shared: dict[str, Any] = {
        "model": "default",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "context_window": 2048,
        "temperature": 0,
    }
    model = OpenAILike(is_chat_model=True, is_function_calling_model=True, max_tokens=64, **shared)
    plain = OpenAILike(max_tokens=4, **shared)
    turns = [ChatMessage(role="user", content=QUESTION)]

    class Person(BaseModel):
        name: str
        age: int

    def chat() -> None:
        has(model.chat(turns).message.content, ANSWER)

    def stream() -> None:
        has("".join(chunk.delta or "" for chunk in model.stream_chat(turns)), ANSWER)

    def complete() -> None:
        assert plain.complete("Hello").text

    def tools() -> None:
        answer = model.chat_with_tools([FunctionTool.from_defaults(get_weather)], user_msg=UMBRELLA)
        [call] = model.get_tool_calls_from_response(answer)
        assert call.tool_kwargs == {"city": CITY}, call

    def structured() -> None:
        person = model.structured_predict(Person, _prompt(FACT))
        assert set(person.model_dump()) == set(PERSON), person

    def _prompt(text: str) -> Any:
        from llama_index.core.prompts import PromptTemplate

        return PromptTemplate(text)

    return {"chat": chat, "stream_chat": stream, "complete": complete, "tools": tools, "structured_predict": structured}


def pydantic_ai_checks(url: str) -> Checks:
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    claude = AnthropicProvider(base_url=url, api_key="none")
    models: dict[str, Any] = {
        "chat": OpenAIChatModel("default", provider=provider),
        "responses": OpenAIResponsesModel("default", provider=provider),
        "anthropic": AnthropicModel("default", provider=claude),
    }
    settings: Any = {"temperature": 0, "max_tokens": 64}

    class Person(BaseModel):
        name: str
        age: int

    def run(model: Any) -> Check:
        return lambda: has(Agent(model, model_settings=settings).run_sync(QUESTION).output, ANSWER)

    def stream(model: Any) -> Check:
        def check() -> None:
            answer = Agent(model, model_settings=settings).run_stream_sync(QUESTION)
            has("".join(answer.stream_text(delta=True)), ANSWER)

        return check

    def agent(model: Any) -> Check:
        def check() -> None:
            answer = Agent(model, model_settings=settings, tools=[get_weather]).run_sync(UMBRELLA)
            has(answer.output, REPORT)
            assert answer.usage.requests == 2, answer.usage

        return check

    def structured(model: Any) -> Check:
        def check() -> None:
            answer = Agent(model, model_settings=settings, output_type=NativeOutput(Person)).run_sync(FACT)
            assert answer.output.model_dump() == PERSON, answer.output

        return check

    checks: Checks = {}
    for name, model in models.items():
        checks |= {f"{name} run": run(model), f"{name} stream": stream(model), f"{name} agent": agent(model)}
    return checks | {
        "chat structured output": structured(models["chat"]),
        "responses structured output": structured(models["responses"]),
    }


def agents_checks(url: str) -> Checks:
    import agents
    import openai

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    agents.set_tracing_disabled(True)
    models = {
        "responses": agents.OpenAIResponsesModel("default", client),
        "chat": agents.OpenAIChatCompletionsModel("default", client),
    }
    settings = agents.ModelSettings(temperature=0, max_tokens=64)
    tool = agents.function_tool(get_weather)

    def run(model: Any) -> Check:
        def check() -> None:
            agent = agents.Agent(name="weft", model=model, model_settings=settings)
            has(agents.Runner.run_sync(agent, QUESTION).final_output, ANSWER)

        return check

    def loop(model: Any) -> Check:
        def check() -> None:
            agent = agents.Agent(name="weft", model=model, model_settings=settings, tools=[tool])
            has(agents.Runner.run_sync(agent, UMBRELLA).final_output, REPORT)

        return check

    def stored() -> None:
        agent = agents.Agent(name="weft", model=models["responses"], model_settings=settings)
        first = agents.Runner.run_sync(agent, "Remember this list.\nOshan: 7750")
        second = agents.Runner.run_sync(
            agent, "What is the number of Oshan?", previous_response_id=first.last_response_id
        )
        has(second.final_output, ANSWER)

    checks: Checks = {"previous_response_id": stored}
    for name, model in models.items():
        checks |= {f"{name} run": run(model), f"{name} tool loop": loop(model)}
    return checks


def lm_eval_checks(url: str) -> Checks:
    def generate() -> None:
        scores = evaluate(
            url,
            "output_type: generate_until\ndoc_to_target: '{{answer}}'\n"
            "generation_kwargs: {until: ['\\n\\n'], max_gen_toks: 8, temperature: 0}\n"
            "metric_list: [{metric: exact_match}]\n",
        )
        assert 0.0 <= scores["exact_match,none"] <= 1.0, scores

    def loglikelihood() -> None:
        scores = evaluate(
            url,
            "output_type: multiple_choice\ndoc_to_choice: ['{{answer}}', '{{wrong}}']\n"
            "doc_to_target: 0\nmetric_list: [{metric: acc}]\n",
        )
        assert scores["acc,none"] == 1.0, scores

    return {"generate_until": generate, "loglikelihood": loglikelihood}


def evaluate(url: str, task: str) -> dict[str, float]:
    """The scores of a task of its own, offline, by local-completions."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        turn = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\nOshan:"
        rows = [{"question": turn, "answer": f" {ANSWER}", "wrong": f" {wrong}"} for wrong in (1234, 9999, 6060)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "task.yaml").write_text(
            "task: weft_task\ndataset_path: json\ntest_split: test\n"
            f"dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}\n"
            f"doc_to_text: '{{{{question}}}}'\n{task}"
        )
        arguments = (
            f"model=default,base_url={url}/v1/completions,tokenizer_backend=huggingface,"
            f"tokenizer={MODEL},tokenized_requests=False,num_concurrent=2,max_length=2048"
        )
        command = [
            sys.executable,
            "-m",
            "lm_eval",
            "--model",
            "local-completions",
            "--model_args",
            arguments,
            "--tasks",
            "weft_task",
            "--include_path",
            str(folder),
            "--output_path",
            str(folder / "out"),
        ]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "OPENAI_API_KEY": "none",
            "HF_HOME": str(folder / "home"),
        }
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
        assert run.returncode == 0, run.stderr[-3000:]
        [results] = (folder / "out").rglob("results*.json")
        scores: dict[str, float] = json.loads(results.read_text())["results"]["weft_task"]
        return scores


def ollama_checks(url: str) -> Checks:
    """A session with Ollama's own client. A pull without a hub, and with one, is in
    ``tests/server/test_created_names.py``."""
    import ollama

    client = ollama.Client(host=url)
    question = [{"role": "user", "content": QUESTION}]

    def ask(**more: Any) -> Any:
        return client.chat(model="default", options={"temperature": 0}, messages=question, **more)

    def chat() -> None:
        has(ask().message.content, ANSWER)
        has("".join(line.message.content for line in ask(stream=True)), ANSWER)

    def generate() -> None:
        has(client.generate("default", QUESTION, options={"temperature": 0}).response, ANSWER)

    def tools() -> None:
        answer = client.chat(model="default", tools=[get_weather], messages=[{"role": "user", "content": UMBRELLA}])
        [call] = answer.message.tool_calls or ()
        assert call.function.arguments == {"city": CITY}, call

    def formats() -> None:
        answer = client.chat(
            model="default",
            format=PERSON_SCHEMA,
            options={"temperature": 0},
            messages=[{"role": "user", "content": f"{FACT} Write it as JSON."}],
        )
        assert set(json.loads(answer.message.content or "")) == set(PERSON), answer

    def created_names() -> None:
        served = str(client.list().models[0].model)
        first, name = "Remember this list.\nOshan: 7750", "clients/keeper"
        client.create(
            model=name,
            from_=served,
            parameters={"temperature": 0},
            messages=[{"role": "user", "content": first}, {"role": "assistant", "content": "OK."}],
        )
        client.copy(name, "clients/second")
        client.delete(name)
        has(
            client.chat(
                "clients/second", [{"role": "user", "content": "What is the number of Oshan?"}]
            ).message.content,
            ANSWER,
        )
        assert client.show("clients/second").details.parent_model == served  # type: ignore[union-attr]
        client.delete("clients/second")
        assert [one.model for one in client.list().models] == [served]

    return {
        "chat": chat,
        "generate": generate,
        "tools": tools,
        "format": formats,
        "create, copy, show, delete": created_names,
    }


def picture_checks(url: str) -> Checks:
    """Of a server whose model sees, at $SEEING_URL: the client's own types bring a picture there. Its
    rows are tokens of the prompt."""
    import base64
    import io

    import anthropic
    import ollama
    import openai
    from PIL import Image

    seeing, out = os.environ["SEEING_URL"], io.BytesIO()
    Image.new("RGB", (200, 120), "teal").save(out, "PNG")
    data = base64.b64encode(out.getvalue()).decode()
    address = f"data:image/png;base64,{data}"
    client = openai.OpenAI(base_url=f"{seeing}/v1", api_key="none")

    def chat() -> None:
        answer = client.chat.completions.create(
            model="default",
            max_tokens=2,
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": "look"}],
                }
            ],
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > ROWS_LEAST, answer.usage

    def responses() -> None:
        answer = client.responses.create(
            model="default",
            max_output_tokens=2,
            input=[{"role": "user", "content": [{"type": "input_image", "image_url": address, "detail": "auto"}]}],
        )
        assert answer.usage is not None
        assert answer.usage.input_tokens > ROWS_LEAST, answer.usage

    def messages() -> None:
        answer = anthropic.Anthropic(base_url=seeing, api_key="none").messages.create(
            model="default",
            max_tokens=2,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
                    ],
                }
            ],
        )
        used = answer.usage
        assert used.input_tokens + (used.cache_read_input_tokens or 0) > ROWS_LEAST, used

    def of_ollama() -> None:
        answer = ollama.Client(host=seeing).chat(
            model="default",
            options={"num_predict": 2},
            messages=[{"role": "user", "content": "look", "images": [out.getvalue()]}],
        )
        assert (answer.prompt_eval_count or 0) > ROWS_LEAST, answer

    return {
        "chat picture": chat,
        "responses picture": responses,
        "anthropic picture": messages,
        "ollama picture": of_ollama,
    }


CLIENTS: dict[str, tuple[tuple[str, ...], Callable[[str], Checks]]] = {
    "litellm": (("litellm", "mcp"), litellm_checks),  # it imports mcp where a request has tools
    "langchain": (("langchain-openai", "langchain-anthropic"), langchain_checks),
    "llama-index": (("llama-index-llms-openai-like",), llama_index_checks),
    "pydantic-ai": (("pydantic-ai-slim[openai,anthropic]",), pydantic_ai_checks),
    "openai-agents": (("openai-agents",), agents_checks),
    "ollama": (("ollama",), ollama_checks),
    "lm-eval": (("lm-eval[api]", "transformers"), lm_eval_checks),
    "pictures": (("openai", "anthropic", "ollama", "pillow"), picture_checks),
}
"""Name -> (packages, checks)."""


def check(name: str, url: str) -> int:
    packages, checks_of = CLIENTS[name]
    rows: dict[str, tuple[list[str], list[str]]] = {}
    for what, use in checks_of(url).items():
        first, _, rest = what.partition(" ")
        api, shown = (first, rest) if first in APIS and rest else ("", what)
        works, fails = rows.setdefault(api, ([], []))
        try:
            use()
            works.append(shown)
        except Exception as error:
            traceback.print_exc()
            fails.append(f"{shown} ({type(error).__name__})")
    versions = ", ".join(
        f"{package.partition('[')[0]} {importlib.metadata.version(package.partition('[')[0])}" for package in packages
    )
    for api, (works, fails) in rows.items():
        cells = [name, versions, api or "other", ", ".join(works), ", ".join(fails) or "nothing"]
        print("|", " | ".join(cells), "|", flush=True)
    return int(any(fails for _, fails in rows.values()))


def main(arguments: list[str]) -> int:
    match arguments:
        case ["names"]:
            print("\n".join(CLIENTS))
        case ["packages", name] if name in CLIENTS:
            print("\n".join(CLIENTS[name][0]))
        case ["check", name, url] if name in CLIENTS:
            return check(name, url)
        case _:
            print(f"{__doc__}\nclients: {', '.join(CLIENTS)}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
