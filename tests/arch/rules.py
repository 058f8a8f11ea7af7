"""The checkers: functions from text to complaints, so that each can be run on a bad snippet too.

This file does not import weft. A complaint is one sentence that names the file and the fault.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"

BASE = {
    "added_tokens",
    "adapters",
    "environment",
    "errors",
    "units",
    "spec",
    "config",
    "request",
    "families",
    "files",
    "info",
    "kv_events",
    "logs",
    "host",
    "numa",
    "config_check",
    "default_sampling",
    "foreign",
    "handoff",
    "pictures",
    "snapshot_report",
    "tasks",
    "pre_tokenizers",
    "prefix_digests",
    "shares",
    "version",
}
PURE = {
    "base",
    "memory",
    "planning",
    "speculation",
    "schedule",
    "engine",
    "sim",
    "text",
    "store",
    "router",
    "costs",
    "images",
    "objects",
}
"""Groups that never import torch, not even indirectly."""
TOOLS = {"sim", "eval", "bench", "quantize", "commands"}
"""Groups of weft_tools, which no group of weft may import."""
EDGES = {"server", "fleet", "rpc", "cli", "embedded"} | TOOLS
"""Groups that no group but an edge may import."""

BELOW_EDGES = {
    "base",
    "memory",
    "speculation",
    "schedule",
    "engine",
    "tensor",
    "models",
    "runner",
    "assemble",
    "api",
    "text",
    "planning",
    "store",
    "router",
    "ranks",
    "costs",
    "images",
    "objects",
}
ARROWS: dict[str, set[str]] = {
    "base": {"base"},
    "memory": {"base"},
    "planning": {"base", "memory", "costs"},
    "costs": {"base"},
    "speculation": {"base", "memory", "costs"},
    "schedule": {"base", "memory", "speculation", "costs"},
    "engine": {"base", "memory", "speculation", "schedule", "costs"},
    "sim": {"base", "memory", "planning", "speculation", "schedule", "engine", "store", "router", "costs"},
    "text": {"base", "images"},
    "images": {"base"},
    "objects": {"base", "text", "store"},
    "store": {"base", "memory"},
    "router": {"base", "costs"},
    "tensor": {"base", "_native"},
    "models": {"base", "tensor", "images"},
    "runner": {"base", "tensor", "models", "images"},
    "ranks": {"base", "memory", "schedule", "engine", "tensor", "models", "runner"},
    "assemble": {"base", "memory", "speculation", "schedule", "engine", "tensor", "models", "runner", "text",
                 "store", "planning", "ranks", "costs", "images"},
    "api": {"base", "memory", "speculation", "schedule", "engine", "tensor", "models", "runner", "assemble",
            "text", "store", "ranks", "images", "objects"},
    "weft": {"base", "api"},
    "embedded": {"base"},
    "rpc": BELOW_EDGES,
    "server": BELOW_EDGES | {"fleet", "rpc"},
    "fleet": BELOW_EDGES | {"rpc"},
    "cli": BELOW_EDGES | EDGES - TOOLS,
    "__main__": {"cli"},
    "weft_tools": set(),
    "eval": {"base", "text"},
    "bench": BELOW_EDGES,
    "quantize": {"base", "tensor", "models"},
    "commands": BELOW_EDGES | {"cli"} | TOOLS,
}  # fmt: skip
"""Group -> groups it may import besides itself."""

EXTRA_MODULES: dict[str, set[str]] = {
    "sim": {"weft.rpc.recording"},
    "runner": {
        "weft.schedule.plan",
        "weft.engine.executor",
        "weft.engine.stats",
        "weft.memory.frames.plan",
        "weft.memory.arena_work",
        "weft.memory.prefix_store",
    },
}
"""Single modules a group may see of groups that are otherwise closed to it: plain values and Protocols."""

TRITON_FILES = re.compile(r"/tensor/kernels/|_kernels\.py$|/tensor/gpu/(?!__init__|runs|prefill_backend)\w+\.py$")
"""Files of kernels and of functions that kernels call."""

IMPURE_MODULES = {"time", "random", "os", "socket", "secrets", "subprocess", "threading", "pathlib", "io"}
"""Clock, randomness, environment and I/O: passed into these groups, never imported by them."""
CLOCKLESS = {"memory", "speculation", "schedule", "engine", "router", "costs"}

FILE_STATEMENTS_MAX = 400
FUNCTION_STATEMENTS_MAX = 45
LONGER: dict[str, str] = {
    "src/weft/models/adapters.py": "a load of an adapter, from peft's file to factors by module, is one walk",
    "src/weft/runner/torch_executor.py": "one step from plan to tokens; parts that could leave have left",
    "src/weft/tensor/kernels/moe.py: _product": "a Triton kernel: the compiler takes no calls in place of its loops",
    "src/weft/memory/prefix/eviction.py: choose": "a walk over candidates that shares a dozen local counts",
    "src/weft/schedule/admission.py: plan": "the order in which a request's claims are made, in one place",
    "src/weft/assemble/assembly.py: assemble": "a list of the parts of an engine, in the order of their making",
}
"""Files and functions above the limits of size, each with its reason."""
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
FORBIDDEN_WORDS = (
    "TO" + "DO",
    "FIX" + "ME",
    "NotImplemented" + "Error",
    "pytest." + "skip",
    "mark." + "skip",
    "x" + "fail",
)

_MACHINE_PATH = re.compile(r"(?<![\w.$~}-])/(?:home/[a-z_][\w.-]*|root|Users/[A-Za-z][\w.-]*|work|tmp/w)/")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Source:
    """A Python file by its place: ``path`` is relative to the repository."""

    path: str
    text: str

    @property
    def module(self) -> str:
        """Its module: weft.memory.transaction for src/weft/memory/transaction.py, the package for an __init__."""
        parts = list(Path(self.path).with_suffix("").parts)
        parts = parts[1:] if parts[0] == "src" else parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PACKAGES = ("weft", "weft_tools")


def weft_sources() -> list[Source]:
    """Return the files of both packages."""
    return [
        Source(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((SRC / package).rglob("*.py"))
    ]


def tracked_files() -> list[Path]:
    """Return the files of the repository that git tracks or would track. Without git, all files that no build makes."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode == 0:
        paths = [ROOT / line for line in listing.stdout.splitlines()]
    else:
        made = {".venv", ".git", "__pycache__", "build", "dist"}
        paths = [path for path in ROOT.rglob("*") if not made.intersection(path.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file()]


def statement_count(tree: ast.AST) -> int:
    """Return the statements inside ``tree``, nested ones included. No formatting changes it."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - isinstance(tree, ast.stmt)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements inside of ``node``, at any depth: a tenth of the nodes of ``ast.walk``, which visits the
    expressions too. No import, function or class is inside of one."""
    for blocks in ("body", "handlers", "cases", "orelse", "finalbody"):
        for inner in getattr(node, blocks, ()):
            yield inner
            yield from statements(inner)


@dataclass(frozen=True, slots=True)
class Contents:
    """Facts about a file that several tests need. The syntax tree is not cached: each garbage collection would walk
    it.
    """

    imports: tuple[tuple[int, str, str, bool], ...]
    """(line, dotted module, name, may it be a module) of every import anywhere, lazy ones too; relative ones
    resolved. The name is empty for ``import module``."""
    functions: tuple[tuple[int, str, int], ...]
    """(line, name, statements)."""
    statements: int
    classes: tuple[str, ...]
    names: dict[str, int]
    """Each name, attribute, parameter, keyword, function and class -> a line that has it."""


@functools.cache
def contents(source: Source) -> Contents:
    tree = ast.parse(source.text)
    package = source.module.split(".")
    if not source.path.endswith("__init__.py"):
        package = package[:-1]
    imports: list[tuple[int, str, str, bool]] = []
    functions, classes = [], []
    for node in statements(tree):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name, "", False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            may_be_module = module in PACKAGES or node.module is None  # `from weft import memory`
            imports += [(node.lineno, module, alias.name, may_be_module) for alias in node.names]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.append((node.lineno, node.name, statement_count(node)))
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
    names: dict[str, int] = {}
    for line, name in _names(tree):
        names.setdefault(name, line)
    return Contents(tuple(imports), tuple(functions), statement_count(tree), tuple(classes), names)


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.alias(asname=str(name)) | ast.Name(id=name) | ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.keyword(arg=str(name)):
                yield node.value.lineno, name


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """Return (line, dotted module) of every import of a file."""
    yield from dict.fromkeys(
        (line, f"{module}.{name}" if may_be_module else module)
        for line, module, name, may_be_module in contents(source).imports
    )


def imported_names(source: Source) -> Iterator[tuple[str, str]]:
    """Return (module, name) of every import of a file; the name is empty for ``import module``."""
    yield from ((module, name) for _, module, name, _ in contents(source).imports)


def group_of(module: str) -> str:
    """Return the group of a module: memory for weft.memory.transaction, base for weft.units, weft for weft. An unknown
    group has its own name."""
    parts = module.split(".")
    if len(parts) == 1:
        return parts[0]
    return "base" if parts[1] in BASE else parts[1]


def arrow_complaints(sources: Iterable[Source]) -> list[str]:
    """Return a complaint for each import between groups that ARROWS does not allow, and for each unknown group."""
    complaints = []
    for source in sources:
        group = group_of(source.module)
        if group not in ARROWS:
            complaints.append(f"{source.path}: {group} has no row in the table of arrows")
            continue
        for line, module in imported_modules(source):
            if module.split(".")[0] not in PACKAGES:
                continue
            target = group_of(module)
            if target in {"weft", *_EXPORTED} or target == group or target in ARROWS[group]:
                continue
            if module in EXTRA_MODULES.get(group, set()):
                continue
            complaints.append(f"{source.path}:{line}: {group} imports {module}")
    return complaints


_EXPORTED = {"ChatReply", "Completion", "Engine", "SamplingParams", "__version__"}
"""Names that ``from weft import X`` may mean and that are not groups."""


def purity_complaints(sources: Iterable[Source]) -> list[str]:
    """Return a complaint for torch or transformers in the pure half, for clocks and I/O in its core, and for
    hasattr.
    """
    complaints = []
    for source in sources:
        group = group_of(source.module)
        for line, module in imported_modules(source):
            top = module.split(".")[0]
            if group in PURE and top in {"torch", "transformers"}:
                complaints.append(f"{source.path}:{line}: the pure half imports {top}")
            if group in CLOCKLESS and top in IMPURE_MODULES:
                complaints.append(f"{source.path}:{line}: {group} imports {top}; it must be passed in")
        if group in PURE:
            complaints += [
                f"{source.path}:{line}: hasattr in the pure half"
                for name, line in contents(source).names.items()
                if name == "hasattr"
            ]
    return complaints


def triton_complaints(sources: Iterable[Source]) -> list[str]:
    """Return a complaint for Triton outside the files of kernels: it is large, and not installed everywhere."""
    return [
        f"{source.path}:{line}: imports triton"
        for source in sources
        if not TRITON_FILES.search(source.path)
        for line, module in imported_modules(source)
        if module.split(".")[0] == "triton"
    ]


def size_complaints(sources: Iterable[Source], longer: Iterable[str] = ()) -> list[str]:
    """Return a complaint for each file and function over its limit that ``longer`` does not name, and for each
    name in ``longer`` that is within its limit by now."""
    sizes = {}
    for source in sources:
        found = contents(source)
        if found.statements > FILE_STATEMENTS_MAX:
            sizes[source.path] = found.statements
        sizes |= {
            f"{source.path}: {name}": count for _, name, count in found.functions if count > FUNCTION_STATEMENTS_MAX
        }
    return [f"{place}: {count} statements" for place, count in sizes.items() if place not in longer] + [
        f"{place}: within the limit; remove it from the exceptions" for place in longer if place not in sizes
    ]


def name_complaints(paths: Iterable[str]) -> list[str]:
    """Return a complaint for each file and folder with a name for a drawer (such as utils) instead of a mechanism."""
    return [
        f"{path}: named {part}"
        for path in paths
        for part in Path(path).with_suffix("").parts
        if part.strip("_").lower() in FORBIDDEN_NAMES
    ]


def word_complaints(sources: Iterable[Source]) -> list[str]:
    """Return a complaint for work left for later, and for tests that do not run."""
    return [
        f"{source.path}:{number}: {word}"
        for source in sources
        for number, line in enumerate(source.text.splitlines(), 1)
        for word in FORBIDDEN_WORDS
        if word in line
    ]


def machine_path_complaints(path: str, text: str) -> list[str]:
    """Return a complaint for each absolute path that exists only on one person's machine."""
    return [
        f"{path}:{number}: {match.group(0)}"
        for number, line in enumerate(text.splitlines(), 1)
        for match in _MACHINE_PATH.finditer(line)
    ]


def links_of(markdown: str) -> list[str]:
    """Return the targets of the links of a page, without those in code blocks."""
    prose = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    return [match.group(1) for match in _LINK.finditer(re.sub(r"`[^`]*`", "", prose))]


def anchors_of(markdown: str) -> set[str]:
    """Return the anchors of the headings: lower case, spaces to dashes, punctuation dropped."""
    prose = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    titles = re.findall(r"^#{1,6}\s+(.*?)\s*$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def link_complaints(page: Path, text: str, root: Path = ROOT) -> list[str]:
    """Return a complaint for each relative link of ``page`` to a missing file or heading, or out of the repository."""
    complaints = []
    for target in links_of(text):
        if re.match(r"[a-z]+:", target):
            continue
        file_part, _, anchor = target.partition("#")
        goal = (page.parent / file_part).resolve() if file_part else page
        where = page.relative_to(root)
        if not goal.is_relative_to(root) or not goal.exists():
            complaints.append(f"{where}: the link {target} leads nowhere")
        elif anchor and goal.suffix == ".md":
            body = text if goal == page else goal.read_text(encoding="utf-8")
            if anchor not in anchors_of(body):
                complaints.append(f"{where}: {target} names no heading of {goal.relative_to(root)}")
    return complaints


def unreachable_pages(start: Path, pages: Iterable[Path]) -> list[Path]:
    """Return the pages that links from ``start`` do not lead to."""
    seen: set[Path] = set()
    to_read = [start.resolve()]
    while to_read:
        page = to_read.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        links = links_of(page.read_text(encoding="utf-8"))
        inside = [link for link in links if not re.match(r"[a-z]+:", link)]
        to_read += [(page.parent / link.partition("#")[0]).resolve() for link in inside]
    return [page for page in pages if page.resolve() not in seen]


def area_of(complaint: str) -> str:
    """Return the folder that a complaint belongs to; a page of docs/ and a file of the root are areas too."""
    parts = complaint.partition(":")[0].split("/")
    if parts[0] == "src":
        return "/".join(parts[:3] if len(parts) > 3 else parts[:2])
    if parts[0] == "docs":
        return "/".join(parts[:2])
    return parts[0]


def beyond_the_ratchet(complaints: Iterable[str], excused: set[str]) -> list[str]:
    """Return the complaints outside the excused areas, and one for each excused area without complaints."""
    listed = list(complaints)
    clean = excused - {area_of(complaint) for complaint in listed}
    return [complaint for complaint in listed if area_of(complaint) not in excused] + [
        f"{area}: is clean: remove it from tests/arch/not_yet_clean.py" for area in sorted(clean)
    ]
