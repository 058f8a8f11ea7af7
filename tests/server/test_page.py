"""The page at /: its files, what they may load, and what its script makes of the server's numbers."""

from __future__ import annotations

import hashlib
import json
import re
from importlib import resources
from typing import Any

import click
import msgspec
import pytest
from py_mini_racer import MiniRacer

from tests.server.running import ROOT, RunningServer
from tests.unit.engine.rig import Rig
from weft.cli.main import cli
from weft.cli.top import read_metrics
from weft.costs.step import StepCost
from weft.server.cache import cache_reports
from weft.server.metrics import COUNTERS, FLEET, MODEL
from weft.server.page import page_files

SERVER = {"api_key": ["a-key"]}
FILES = {name: file.read_text("utf-8") for name, file in page_files().items()}
PAGES = {"index.html", "docs.html"}
SCRIPTS = "".join(text for name, text in FILES.items() if name.endswith(".js") and "/" not in name)
VENDOR = resources.files("weft.server") / "page_files" / "vendor"


@pytest.fixture(scope="module")
def metrics(server: RunningServer) -> str:
    """After a request, so that every sum has something to say."""
    server.client(api_key="a-key").completions.create(model="default", prompt="say:hello")
    return server.get("/metrics", headers={"Authorization": "Bearer a-key"}).text


@pytest.fixture(scope="module")
def readings() -> MiniRacer:
    """readings.js, which knows nothing of a page, in a JavaScript engine."""
    engine = MiniRacer()
    engine.eval(FILES["readings.js"].replace("export ", ""))
    return engine


def call(engine: MiniRacer, function: str, *arguments: Any) -> Any:
    text = ", ".join(json.dumps(argument) for argument in arguments)
    return json.loads(str(engine.eval(f"JSON.stringify({function}({text}))")))


def test_the_page_needs_no_key_and_its_numbers_do(server: RunningServer) -> None:
    page = server.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == FILES["index.html"]
    assert server.get("/docs").text == FILES["docs.html"]
    for name in FILES.keys() - PAGES:
        assert server.get(f"/page/{name}").text == FILES[name]
    for path in (
        "/metrics",
        "/v1/cache",
        "/version",
        "/page/",
        "/page/other.js",
        "/page/..%2fpage.py",
        "/page/vendor/",
    ):
        assert server.get(path).status_code == 401, path


def test_the_page_loads_nothing_from_elsewhere_and_says_so(server: RunningServer) -> None:
    rules = server.get("/").headers["content-security-policy"].split("; ")
    policy = dict(rule.split(" ", 1) for rule in rules)
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    loaded = {name for page in PAGES for name in re.findall(r'(?:src|href)="(?!data:)([^"]*)"', FILES[page])}
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["trusted-types"] == "dompurify", "nothing else makes HTML of a text"
    imported = re.findall(r'(?:from |import |import\()"\./([^"]*)"', SCRIPTS)
    links = {"openapi.json", "./", "docs", "#chat", "#server"}
    assert {name.removeprefix("page/") for name in loaded - links} | set(imported) == FILES.keys() - PAGES
    forbidden_by_the_policy = re.compile(r"<script(?![^>]*src=)|\son\w+=|\sstyle=")
    assert not any(forbidden_by_the_policy.search(FILES[page]) for page in PAGES)
    assert "innerHTML" not in SCRIPTS


def test_the_libraries_of_the_page_are_those_that_their_authors_published() -> None:
    rows = re.findall(r"^\| `([^`]+)` .* `([^`]+)` \| `([0-9a-f]{64})` \|$", (VENDOR / "README.md").read_text(), re.M)
    assert {name for name, _, _ in rows} == {file.name for file in VENDOR.iterdir() if file.name.endswith(".js")}
    for name, licence, digest in rows:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name
        assert "Copyright" in (VENDOR / licence).read_text("utf-8")
    assert licence_patterns_match({file.name for file in VENDOR.iterdir() if file.name.startswith("LICENSE")})


def licence_patterns_match(names: set[str]) -> bool:
    """Return whether the wheel's metadata carries these licences of the libraries."""
    [patterns] = re.findall(r"^license-files = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.M)
    found = {path.name for pattern in json.loads(patterns) for path in ROOT.glob(pattern)}
    return {"LICENSE", *names} <= found


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ("null", "This server wants a key: put it into the box."),
        ('"an-old-one"', "That is no key of this server: put another one into the box."),
    ],
)
def test_a_page_without_a_right_key_names_the_box_and_no_header(server: RunningServer, kept: str, words: str) -> None:
    refusal = server.get("/metrics")
    assert (refusal.status_code, "header" in refusal.text) == (401, True), "what a program reads"
    engine = MiniRacer()
    engine.eval(
        re.sub(r"^export ", "", FILES["server.js"], flags=re.MULTILINE)
        + f"""
        const sessionStorage = {{getItem: () => {kept}}};
        const fetch = async () => ({{ok: false, status: 401, json: async () => ({refusal.text})}});
        let said;
        ask("metrics").catch((error) => {{ said = [error instanceof KeyWantedError, error.message]; }});"""
    )
    assert json.loads(str(engine.eval("JSON.stringify(said)"))) == [True, words]


def test_every_part_that_the_script_asks_for_is_in_the_page() -> None:
    asked = set(re.findall(r'\bpart\("([^"]+)"\)', SCRIPTS))
    assert asked
    assert asked <= set(re.findall(r'\bid="([^"]+)"', FILES["index.html"]))


def test_every_number_that_the_script_reads_is_one_that_the_server_has(metrics: str) -> None:
    asked = set(re.findall(r"(?:values|byLabel)\??\.([a-z_]+)", SCRIPTS))
    asked |= {
        f"{name}_count" if name.endswith("seconds") else name
        for name in re.findall(r'"([a-z_]+_(?:total|seconds))"', SCRIPTS)
    }
    assert {"num_requests_running", "memory_bytes", "time_to_first_token_seconds_count"} <= asked
    not_yet = {row.sample_name for row in (*MODEL, *FLEET)} | {f"{name}_total" for name in COUNTERS}
    assert asked <= {*re.findall(r"^weft:(\w+)", metrics, re.MULTILINE), *not_yet}


def test_the_script_reads_what_weft_top_reads(readings: MiniRacer, metrics: str) -> None:
    expected = read_metrics(metrics, 5.0)
    found = call(readings, "parse", metrics, 5.0)
    assert (found["model"], found["at"]) == (expected.model, 5.0)
    assert expected.values.items() <= found["values"].items()
    assert {name: dict(numbers) for name, numbers in expected.by_label.items()} == {
        name: numbers for name, numbers in found["byLabel"].items() if name in expected.by_label
    }
    assert found["values"]["time_to_first_token_seconds_count"] == 1
    assert call(readings, "sleepState", found) == "up"


def test_a_model_of_any_name_is_read(readings: MiniRacer) -> None:
    text = 'x:engine_up{engine="0",model_name="a \\"b\\" {c} \\\\ d"} 1.0\n'
    assert call(readings, "parse", text, 0)["model"] == 'a "b" {c} \\ d'


def test_several_engines_add_up_and_are_read_one_by_one(readings: MiniRacer) -> None:
    text = "".join(
        f'weft:engine_up{{engine="{number}",model_name="m"}} {up}\n'
        f'weft:generation_tokens_total{{engine="{number}",model_name="m"}} {tokens}\n'
        f'weft:memory_bytes{{engine="{number}",model_name="m",use="free"}} 50\n'
        for number, up, tokens in ((0, 1, 7), (1, 0, 5))
    )
    found = call(readings, "parse", text + 'weft:request_resumes_total{engine="0",model_name="m"} 2\n', 0)
    assert (found["values"]["generation_tokens_total"], found["byLabel"]["memory_bytes"]["free"]) == (12, 100)
    assert {number: numbers["generation_tokens_total"] for number, numbers in found["engines"].items()} == {
        "0": 7,
        "1": 5,
    }
    assert call(readings, "sleepState", found) == "1 of 2 engines up"


def reading(at: float, **values: float) -> dict[str, Any]:
    return {"at": at, "model": "m", "values": values, "byLabel": {}}


def test_several_models_add_up_and_are_read_one_by_one(readings: MiniRacer) -> None:
    text = "".join(
        f'weft:{name}{{engine="0",model_name="{model}"}} {value}\n'
        for model, name, value in (
            ("a", "model_loaded", 1),
            ("b", "model_loaded", 1),
            ("c", "model_loaded", 0),
            ("a", "engine_up", 1),
            ("b", "engine_up", 1),
            ("a", "kv_cache_usage_perc", 0.2),
            ("b", "kv_cache_usage_perc", 0.4),
        )
    )
    found = call(readings, "parse", text, 0)
    assert (found["model"], found["engines"], list(found["models"])) == ("3 models", {}, ["a", "b", "c"])
    assert found["values"]["kv_cache_usage_perc"] == pytest.approx(0.3)
    assert call(readings, "sleepState", found) == "2 of 3 models loaded"


def test_rates_and_means_are_of_what_came_between(readings: MiniRacer) -> None:
    before = reading(10, tokens=100, wait_sum=3.0, wait_count=3, prefix_cache_queries_total=50)
    now = reading(12, tokens=160, wait_sum=4.0, wait_count=5, prefix_cache_queries_total=90, prefix_cache_hits_total=10)
    assert call(readings, "rate", now, before, "tokens") == 30
    assert call(readings, "recentMean", now, before, "wait") == 0.5
    assert call(readings, "recentHitRate", now, before) == 0.25
    restarted = reading(14, tokens=5)
    for function, *arguments in (
        ("rate", now, None, "tokens"),
        ("rate", restarted, now, "tokens"),
        ("recentMean", now, now, "wait"),
        ("recentHitRate", before, before),
    ):
        assert call(readings, function, *arguments) is None


def test_saved_seconds_are_priced_by_the_engine_and_not_by_the_prompts_computed_here() -> None:
    """After a restart with a store few prompt tokens are computed and many are found. A mean over the
    computed ones, queues and loading included, priced the found ones forty times too high."""
    rig = Rig(cache=True)
    for number in range(5):
        rig.submit(f"r{number}", [*range(64), 70 + number], max_tokens=5)
        rig.run()
    stats, shape = rig.core.stats(), rig.core.cache_shape()

    def prefixes(costs: StepCost | None) -> list[dict[str, Any]]:
        report: dict[str, Any] = cache_reports([(0, msgspec.structs.replace(stats, costs=costs), shape)])
        return list(report["tree"]["prefixes"])

    cost = StepCost(fixed_s=9.0, token_s=1e-3, pair_s=1e-6)
    saved = {row["tokens"]: row["saved_s"] for row in prefixes(cost)}
    hits = {row["tokens"]: (row["hits"], row["tokens_saved"]) for row in prefixes(cost)}
    assert any(count for count, _ in hits.values())
    for tokens, (count, reused) in hits.items():
        expected = count * cost.prefill_s(0, reused // count) if count else 0.0
        assert saved[tokens] == pytest.approx(expected)
    assert {row["saved_s"] for row in prefixes(None)} == {None}, "nothing was measured: the page says tokens"
    assert "prefix.saved_s === null" in FILES["monitor.js"]


def test_prompt_tokens_are_found_lost_or_new_and_add_up(readings: MiniRacer) -> None:
    now = reading(1, prefix_cache_queries_total=100, prefix_cache_hits_total=60)
    now["byLabel"] = {"prefix_cache_lost_tokens_total": {"evicted_kv": 15.0, "not_ready": 0.0}}
    parts = call(readings, "promptTokens", now)
    assert [(name, tokens) for name, _, tokens in parts] == [("found", 60), ("evicted_kv", 15), ("new", 25)]


def test_drafts_that_cost_time_save_no_negative_seconds(readings: MiniRacer) -> None:
    for seconds, said in (
        (2.04, "2.0 s saved"),
        (-0.14, "0.1 s slower than without drafts"),
        (-0.01, "no time saved yet"),
    ):
        assert call(readings, "speculation", reading(1, spec_decode_saved_seconds=seconds))["saved"] == said


@pytest.fixture(scope="module")
def faults() -> MiniRacer:
    engine = MiniRacer()
    engine.eval(FILES["faults.js"].replace("export ", ""))
    return engine


def faults_of(engine: MiniRacer, **seen: Any) -> list[tuple[str, str, str]]:
    """Return what is wrong, why, and the command that mends it."""
    usual = {"health": {"status": "ok"}, "replicas": [], "cards": [], "url": "http://127.0.0.1:8000/", "hasKey": False}
    rows = call(engine, "faultsOf", {**usual, **seen})
    return [(row["what"], row["why"], row["command"]) for row in rows]


def test_nothing_is_wrong_with_a_server_that_serves(faults: MiniRacer) -> None:
    now = reading(1, num_preemptions_total=3)
    assert faults_of(faults, now=now, first=now) == []
    assert faults_of(faults, now=reading(2, num_preemptions_total=3), first=now) == [], "it was before the page looked"


@pytest.mark.parametrize(
    ("seen", "what", "command"),
    [
        (
            {
                "health": {"status": "degraded", "reason": "r"},
                "replicas": [{"replica": 1, "state": "dead", "reason": "r"}],
            },
            "Engine 1 is dead: its restarts are used up.",
            "weft drain 1 --start --url http://gpu:8000",
        ),
        (
            {"replicas": [{"replica": 0, "state": "drained"}]},
            "Engine 0 is drained.",
            "weft drain 0 --start --url http://gpu:8000",
        ),
        ({"health": {"status": "dead", "reason": "r"}}, "Nothing computes any more.", "systemctl restart weft"),
        ({"health": {"status": "sleeping"}}, "The server sleeps.", "curl -X POST http://gpu:8000/wake_up"),
        (
            {"health": {"status": "paused"}, "hasKey": True},
            "The server is paused.",
            'curl -X POST -H "Authorization: Bearer $WEFT_OPERATOR_KEY" http://gpu:8000/resume',
        ),
        ({"cards": [{"id": "two", "state": "failed", "reason": "r"}]}, "The model two does not load.", "weft doctor"),
        (
            {"now": reading(9, num_preemptions_total=5), "first": reading(1, num_preemptions_total=3)},
            "2 running answers were preempted and will be computed again.",
            "weft plan MODEL --memory SIZE",
        ),
    ],
)
def test_each_fault_names_the_command_that_mends_it(
    faults: MiniRacer, seen: dict[str, Any], what: str, command: str
) -> None:
    [(said, why, mend)] = faults_of(faults, url="http://gpu:8000/", **seen)
    assert (said, mend) == (what, command)
    assert why == "r" or "reason" not in json.dumps(seen)


def test_every_command_of_a_fault_is_one_of_weft(faults: MiniRacer) -> None:
    verbs = set(re.findall(r'"weft (\w+)', SCRIPTS)) | set(re.findall(r"`weft (\w+)", FILES["faults.js"]))
    assert {"drain", "plan", "serve", "doctor", "join", "ps"} <= verbs
    assert verbs <= set(cli.list_commands(click.Context(cli)))


def test_shares_of_replicas_are_a_mean_on_the_page(readings: MiniRacer) -> None:
    text = "".join(
        f'weft:{name}{{engine="{engine}"}} {value}\n'
        for engine, share in ((0, 0.5), (1, 0.7))
        for name, value in (("engine_up", 1), ("kv_cache_usage_perc", share))
    )
    values = call(readings, "parse", text, 1)["values"]
    assert values["kv_cache_usage_perc"] == pytest.approx(0.6)
    assert values["engine_up"] == 2


def test_the_page_says_that_a_bucket_was_away_and_what_waits(readings: MiniRacer) -> None:
    now = reading(
        1,
        store_capacity_bytes=1000,
        store_checkpoints=1,
        store_bytes=10,
        store_damaged_total=0,
        store_restored_tokens_total=0,
        store_saved_seconds_total=0,
        store_uploads_waiting=3,
        store_unreachable_seconds_total=0,
    )
    now["byLabel"] = {"store_writes_total": {"dropped": 0}, "store_uploads_total": {"uploaded": 9, "lost": 0}}
    assert "Bucket" not in call(readings, "storeState", now)
    now["values"]["store_unreachable_seconds_total"] = 34
    now["byLabel"]["store_uploads_total"]["lost"] = 2
    assert call(readings, "storeState", now).endswith("3 uploads wait, 2 lost.")
