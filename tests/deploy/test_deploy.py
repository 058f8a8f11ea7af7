"""deploy/: its files have known fields, and their command lines are weft's."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import promql_parser
import pytest
import yaml

from weft.cli.join import command as join_command
from weft.cli.serve import command as serve_command
from weft.server.config import ServerConfig
from weft.server.metrics import HISTOGRAMS, combines

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def fields(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """Of an object that has no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def several(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


COUNT = {"type": "integer", "minimum": 0}
TEXT = {"type": "string", "minLength": 1}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
QUANTITY = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|Mi|Gi)?$"}
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}
CONTAINER = fields(
    ("name", "image"),
    name=TEXT,
    image=TEXT,
    env=several(fields(("name", "value"), name=TEXT, value=TEXT)),
    ports=several(fields(("containerPort",), name=TEXT, containerPort=PORT)),
    readinessProbe=fields(
        httpGet=fields(("path", "port"), path=TEXT, port=PORT), periodSeconds=COUNT, failureThreshold=COUNT
    ),
    resources=fields(requests=QUANTITIES, limits=QUANTITIES),
)
TEMPLATE = fields(("spec",), metadata=fields(labels=TEXTS), spec=fields(("containers",), containers=several(CONTAINER)))
HEAD = fields(("rayStartParams", "template"), rayStartParams=TEXTS, template=TEMPLATE)
WORKERS = fields(
    ("groupName", "rayStartParams", "template"),
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=TEMPLATE,
)
RAY_JOB = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=fields(("name",), name=TEXT),
    spec=fields(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=TEXT,
        shutdownAfterJobFinishes={"type": "boolean"},
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        backoffLimit=COUNT,
        rayClusterSpec=fields(
            ("headGroupSpec",),
            rayVersion=TEXT,
            enableInTreeAutoscaling={"type": "boolean"},
            headGroupSpec=HEAD,
            workerGroupSpecs=several(WORKERS),
        ),
    ),
)
SERVICE = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "v1"},
    kind={"const": "Service"},
    metadata=fields(("name",), name=TEXT),
    spec=fields(
        ("selector", "ports"), selector=TEXTS, ports=several(fields(("port",), name=TEXT, port=PORT, targetPort=PORT))
    ),
)


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))


def served(line: str) -> ServerConfig:
    """Of a `weft serve` line, through the real parser."""
    from weft.cli.flags import build

    words = shlex.split(line)
    assert words[:2] == ["weft", "serve"]
    context = serve_command.make_context("serve", words[2:])
    return build(ServerConfig, context.params)


def test_the_manifests_have_fields_of_the_api_references() -> None:
    job, service = manifests()
    for manifest, schema in ((job, RAY_JOB), (service, SERVICE)):
        assert list(jsonschema.Draft202012Validator(schema).iter_errors(manifest)) == []


@pytest.mark.parametrize(
    ("old", "new"), [('"maxReplicas"', '"maximumReplicas"'), ('"8Gi"', '"8 GB"'), ("K8sJobMode", "KubernetesMode")]
)
def test_a_wrong_manifest_is_noticed(old: str, new: str) -> None:
    text = json.dumps(manifests()[0])
    assert old in text
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(text.replace(old, new)), RAY_JOB)


def test_the_job_serves_where_the_service_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    job, service = manifests()
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    for variable in head["template"]["spec"]["containers"][0]["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    config = served(job["spec"]["entrypoint"])
    [worker] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert config.port == service["spec"]["ports"][0]["targetPort"]
    assert config.port == head["template"]["spec"]["containers"][0]["ports"][0]["containerPort"]
    assert service["spec"]["selector"] == head["template"]["metadata"]["labels"]
    assert config.replica_range() == (worker["minReplicas"], worker["maxReplicas"])
    requests = worker["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert (config.ray_cpus, config.ray_gpus) == (float(requests["cpu"]), float(requests["nvidia.com/gpu"]))


# ---------------------------------------------------------------------- Kubernetes without Ray, and Compose

OBJECT = {"type": "object"}
PROBE = fields(
    (),
    httpGet=fields(("path", "port"), path=TEXT, port={"const": "http"}, scheme={"enum": ["HTTP", "HTTPS"]}),
    tcpSocket=fields(("port",), port={"const": "http"}),
    periodSeconds=COUNT,
    timeoutSeconds=COUNT,
    failureThreshold=COUNT,
)
POD = fields(
    ("containers", "terminationGracePeriodSeconds"),
    containers=several(
        fields(
            ("name", "image", "args", "startupProbe", "readinessProbe", "livenessProbe"),
            name=TEXT,
            image=TEXT,
            imagePullPolicy={"enum": ["IfNotPresent", "Always", "Never"]},
            args=several(TEXT),
            env=several(fields(("name", "value"), name=TEXT, value=TEXT)),
            ports=several(fields(("containerPort",), name=TEXT, containerPort=PORT)),
            startupProbe=PROBE,
            readinessProbe=PROBE,
            livenessProbe=PROBE,
            lifecycle=fields(("preStop",), preStop=fields(("exec",), exec=OBJECT)),
            resources=fields(requests=QUANTITIES, limits=QUANTITIES),
            securityContext=OBJECT,
            volumeMounts=several(fields(("name", "mountPath"), name=TEXT, mountPath=TEXT, readOnly={"const": True})),
        )
    ),
    automountServiceAccountToken={"const": False},
    enableServiceLinks={"const": False},
    terminationGracePeriodSeconds=COUNT,
    securityContext=OBJECT,
    volumes=several(OBJECT),
)


def test_the_deployment_starts_the_server_where_its_probes_and_its_service_lead() -> None:
    """kubernetes-validate and Helm 4 have checked all fields; here are those that weft must know."""
    volume, service, deployment = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    jsonschema.validate(pod, POD)
    [container] = pod["containers"]
    config = served(shlex.join(["weft", *container["args"]]))
    assert (config.host, config.port) == ("0.0.0.0", container["ports"][0]["containerPort"])
    assert config.api_key_file == container["volumeMounts"][2]["mountPath"] + "/keys"
    name = service["metadata"]["name"]
    assert {name, f"{name}.default.svc.cluster.local"} <= set(config.allowed_host), "else clients get a 421"
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == volume["metadata"]["name"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert pod["terminationGracePeriodSeconds"] > float(variables["WEFT_DRAIN_TIMEOUT"]) + 10
    assert not container.get("livenessProbe", {}).get("httpGet"), (
        "/health is 503 while a server drains or reads weights"
    )


def test_the_chart_reads_the_values_that_it_declares_and_the_manifest_is_its_own() -> None:
    """The manifest is what Helm made of the chart: each of its fixed lines is there."""
    chart = DEPLOY / "chart"
    templates = {file.name: file.read_text() for file in (chart / "templates").iterdir()}
    values = yaml.safe_load((chart / "values.yaml").read_text())
    read = {name for text in templates.values() for name in re.findall(r"\.Values\.([\w.]+)", text)}
    declared = {
        name if not isinstance(value, dict) or not value or name in ("resources", "podAnnotations") else f"{name}.{key}"
        for name, value in values.items()
        for key in (value if isinstance(value, dict) and value else [""])
    }
    assert read == declared
    manifest = (DEPLOY / "kubernetes.yaml").read_text().splitlines()
    depth, fixed = 0, []
    for line in templates["deployment.yaml"].splitlines():
        depth += len(re.findall(r"\{\{-? (?:if|with|range) ", line)) - len(re.findall(r"\{\{-? ?end ", line))
        if not depth and "{{" not in line:
            fixed.append(line)
    assert len(fixed) > 60
    assert [line for line in fixed if line not in manifest] == []


def test_compose_starts_the_server_with_keys_and_waits_for_its_drain() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["weft"]
    words = ["weft", *(re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in service["command"])]
    config = served(shlex.join(words))
    assert service["ports"] == [f"127.0.0.1:8000:{config.port}"]
    assert config.api_key_file == "/run/secrets/" + service["secrets"][0]["target"]
    assert "weft" in config.allowed_host, "the name of the service"
    assert float(service["stop_grace_period"].removesuffix("s")) > config.drain_timeout


def test_the_unit_of_a_joining_machine_is_that_of_a_server_with_another_command() -> None:
    def rest(name: str) -> list[str]:
        lines = (DEPLOY / name).read_text().splitlines()
        return [
            line
            for line in lines
            if "=" in line
            and not line.startswith(
                ("#", "ExecStart", "LoadCredential", "Description", "EnvironmentFile", "After", "Wants")
            )
        ]

    assert rest("weft-join.service") == rest("weft.service")
    line = re.search(r"ExecStart=/opt/weft/bin/(.*)", (DEPLOY / "weft-join.service").read_text())
    assert line is not None
    words = shlex.split(line.group(1))
    assert words[:2] == ["weft", "join"]
    join_command.make_context("join", words[2:])


def test_systemd_accepts_the_unit_where_there_is_one(tmp_path: Path) -> None:
    verifier = shutil.which("systemd-analyze")
    unit = tmp_path / "weft-join.service"  # with a program that is there
    unit.write_text((DEPLOY / unit.name).read_text().replace("/opt/weft/bin/weft", "/usr/bin/env weft"))
    command = [verifier, "verify", "--man=no", str(unit)] if verifier else ["true"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


def test_the_dockerfile_copies_what_there_is_and_starts_weft() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    instructions = [
        line.split(None, 1) for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    assert {word for word, _ in instructions} <= {
        "FROM",
        "RUN",
        "WORKDIR",
        "COPY",
        "ARG",
        "ENV",
        "USER",
        "EXPOSE",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    }
    stages = [rest.split()[2] for word, rest in instructions if word == "FROM" and " AS " in rest]
    assert stages == ["wheel", "base", "cpu", "cuda"]
    for word, rest in instructions:
        if word == "COPY" and not rest.startswith("--from"):
            named = [
                source for source in rest.split()[:-1] if source != "dist*"
            ]  # a release's wheels, where there are some
            assert all((DEPLOY.parent / source).exists() for source in named), rest
        if word == "COPY" and rest.startswith("--from"):
            assert rest.removeprefix("--from=").split()[0] in stages
        if word == "CMD":
            config = served("weft " + shlex.join(json.loads(rest)))
            assert (config.host, config.port) == ("0.0.0.0", 8000)
            assert config.api_key_file == "/run/secrets/weft-keys", "who listens on all addresses wants keys"
        if word == "HEALTHCHECK":
            compile(json.loads(rest.partition("CMD ")[2])[2], "HEALTHCHECK", "exec")
            assert "'8000'" in rest
            assert "/health'" in rest
    assert [word for word, _ in instructions].count("HEALTHCHECK") == 2
    installs = re.findall(r"pip install [^&;]*", " ".join(rest for word, rest in instructions if word == "RUN"))
    assert len(installs) > 3
    known = ("--require-hashes", "--no-deps", "grep -o '^torch==")
    unpinned = [line for line in installs if not any(sign in line for sign in known)]
    assert unpinned == []


# ---------------------------------------------------------------------- what an operator sees

RULES = DEPLOY / "prometheus-rules.yaml"
ALERT = fields(
    ("alert", "expr", "labels", "annotations"),
    alert={"type": "string", "pattern": "^Weft[A-Z]"},
    expr=TEXT,
    labels=fields(("severity",), severity={"enum": ["page", "ticket"]}),
    annotations=fields(("summary",), summary=TEXT),
    **{"for": {"type": "string"}},
)
GROUPS = fields(("groups",), groups=several(fields(("name", "rules"), name=TEXT, rules=several(ALERT))))


def alerts() -> list[dict[str, str]]:
    rules = yaml.safe_load(RULES.read_text())
    jsonschema.validate(rules, GROUPS)
    return [alert for group in rules["groups"] for alert in group["rules"]]


SOURCE = fields(("type", "uid"), type={"const": "prometheus"}, uid={"const": "${datasource}"})
TARGET = fields(
    ("expr", "legendFormat", "refId"), expr=TEXT, legendFormat=TEXT, refId={"type": "string", "pattern": "^[A-Z]$"}
)
ABOVE_ZERO = {"type": "integer", "minimum": 1}
PANEL = fields(
    ("id", "type", "title", "datasource", "fieldConfig", "gridPos", "targets"),
    id=ABOVE_ZERO,
    type={"const": "timeseries"},
    title=TEXT,
    datasource=SOURCE,
    targets=several(TARGET),
    fieldConfig=fields(
        ("defaults",),
        overrides={"type": "array"},
        defaults=fields(("unit",), unit={"enum": ["short", "s", "bytes", "Bps", "percentunit"]}),
    ),
    gridPos=fields(("h", "w", "x", "y"), h=ABOVE_ZERO, w=ABOVE_ZERO, x=COUNT, y=COUNT),
)
SOURCE_VARIABLE = fields(
    ("name", "type", "query"),
    name={"const": "datasource"},
    type={"const": "datasource"},
    query={"const": "prometheus"},
    label=TEXT,
)
LABEL_VARIABLE = fields(
    ("name", "type", "query", "datasource", "allValue"),
    name=TEXT,
    type={"const": "query"},
    query={"type": "string", "pattern": r"^label_values\(weft:\w+(\{[^}]*\})?, \w+\)$"},
    label=TEXT,
    datasource={"const": {"type": "prometheus", "uid": "${datasource}"}},
    refresh={"const": 2},
    multi={"type": "boolean"},
    includeAll={"const": True},
    allValue={"const": ".*"},
    current=TEXTS,
)
VARIABLE = {"anyOf": [SOURCE_VARIABLE, LABEL_VARIABLE]}
DASHBOARD = fields(
    ("title", "uid", "schemaVersion", "panels", "templating", "time"),
    title=TEXT,
    uid=TEXT,
    timezone=TEXT,
    schemaVersion={"type": "integer", "minimum": 36},
    refresh=TEXT,
    time=TEXTS,
    panels=several(PANEL),
    templating=fields(("list",), list=several(VARIABLE)),
)
GRID_COLUMNS = 24


def dashboard_complaints(dashboard: dict[str, Any]) -> list[str]:
    """What Grafana would draw wrong without an error."""
    complaints: list[str] = []
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place, refs = panel["gridPos"], [target["refId"] for target in panel["targets"]]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        if place["x"] + place["w"] > GRID_COLUMNS or cells & taken:
            complaints.append(f"{panel['title']}: it lies over another panel, or beyond the grid")
        taken |= cells
        if len(set(refs)) < len(refs):
            complaints.append(f"{panel['title']}: a refId is there twice")
        for query in (target["expr"] for target in panel["targets"]):
            for name, span in re.findall(r"weft:(\w+)(?:\{[^}]*\})?(\[[^]]*\])?", query):
                if name.endswith(("_total", "_bucket", "_sum", "_count")) != bool(span):
                    complaints.append(f"{panel['title']}: {name} with a range, or without one")
    return complaints


def dashboard() -> dict[str, Any]:
    shown: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    return shown


def unknown_names(queries: list[str]) -> set[str]:
    """Of metrics that no server has."""
    known = set(combines()) | {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
    return {name for query in queries for name in re.findall(r"weft:(\w+)", query)} - known


def panel_queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def test_every_alert_and_every_panel_is_a_query_of_prometheus() -> None:
    """The parser knows the types too: ``rate`` takes a range."""
    for query in [alert["expr"] for alert in alerts()]:
        assert isinstance(promql_parser.parse(query), promql_parser.BinaryExpr), "a condition"
    for query in panel_queries():
        promql_parser.parse(query.replace("$__rate_interval", "5m"))


@pytest.mark.parametrize(("old", "new"), [("[30m]", ""), ("[30m]", "[30 minutes]"), ("))", ")"), ("> 2", ">")])
def test_a_query_that_prometheus_would_refuse_is_noticed(old: str, new: str) -> None:
    [query] = [alert["expr"] for alert in alerts() if alert["alert"] == "WeftEngineRestarts"]
    assert old in query
    with pytest.raises(ValueError, match=r"\w"):
        promql_parser.parse(query.replace(old, new))


def test_every_alert_and_every_panel_asks_for_metrics_that_there_are() -> None:
    panels = panel_queries()
    queries = [alert["expr"] for alert in alerts()]
    assert unknown_names(queries) == unknown_names(panels) == set()
    assert unknown_names(["sum(weft:no_such_total)", "weft:time_to_first_token_seconds"]) == {
        "no_such_total",
        "time_to_first_token_seconds",
    }
    assert len(alerts()) > 10 < len(panels)


def test_the_dashboard_is_one_that_grafana_draws() -> None:
    """No package lints dashboards: its schema, and what Grafana takes without a word and draws wrong."""
    shown = dashboard()
    jsonschema.validate(shown, DASHBOARD)
    assert dashboard_complaints(shown) == []
    for key in ("id", "title"):
        assert len({panel[key] for panel in shown["panels"]}) == len(shown["panels"])


def test_each_panel_shows_the_servers_and_models_that_were_chosen() -> None:
    """A variable that no query reads would be a picker without an effect."""
    names = [variable["name"] for variable in dashboard()["templating"]["list"]]
    assert names == ["datasource", "instance", "model"]
    for query in panel_queries():
        selectors = re.findall(r"(?:weft:|process_)\w+(?:\{([^}]*)\})?", query)
        assert all('instance=~"$instance"' in selector for selector in selectors), query
        assert all('model_name=~"$model"' in s for s in selectors if "job" not in s and "version" not in query), query


def changed_dashboard(keys: tuple[Any, ...], value: object) -> Any:
    """With ``value`` at ``keys`` of its first panel."""
    shown = dashboard()
    inner = shown["panels"][0]
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return shown


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("gridPos", "x"), 8),
        (("gridPos", "w"), 25),
        (("targets", 1, "refId"), "A"),
        (("targets", 0, "expr"), "sum(weft:generation_tokens_total)"),
        (("targets", 0, "expr"), "rate(weft:num_requests_running[5m])"),
    ],
)
def test_a_dashboard_that_would_be_drawn_wrong_is_noticed(keys: tuple[Any, ...], value: object) -> None:
    assert len(dashboard_complaints(changed_dashboard(keys, value))) >= 1


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("type",), "graph"),
        (("fieldConfig", "defaults", "unit"), "seconds"),
        (("datasource", "uid"), "prom"),
        (("targets", 0, "legendFormat"), ""),
        (("targets",), []),
        (("tittle",), "x"),
    ],
)
def test_a_dashboard_of_another_schema_is_noticed(keys: tuple[Any, ...], value: object) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed_dashboard(keys, value), DASHBOARD)


def test_the_page_of_an_operator_has_every_alert_and_no_other() -> None:
    page = (DEPLOY.parent / "docs" / "operating.md").read_text()
    assert set(re.findall(r"^\| `(Weft\w+)` \|", page, re.MULTILINE)) == {one["alert"] for one in alerts()}


def test_alerts_pass_the_linter_of_prometheus_where_there_is_one() -> None:
    """Debian's package prometheus has promtool, and 96 MB in all; else schema and parser have to do."""
    promtool = shutil.which("promtool") or os.environ.get("PROMTOOL")
    assert alerts()
    if promtool is not None:
        done = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
