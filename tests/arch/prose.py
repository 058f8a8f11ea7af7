"""Rules of prose that a program can check: docstrings, comments and Markdown.

``python -m tests.arch.dialect_ceilings`` writes the ceilings of DIALECT again from the counts of today.

A subject is a thing (the sequence, the request, the cache), never a person. Pictures and code are not prose.
Lines of Markdown have at most 120 characters and cells of tables at most 200, except in code blocks, which show the
output of programs.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

from tests.arch.rules import Source

MARKDOWN_LINE_MAX = 120
TABLE_CELL_MAX = 200

DIALECT: dict[str, re.Pattern[str]] = {
    "a sentence without a verb that begins with Of": re.compile(r"(?:^|[.!?]\s+)Of [^.:]*[.:]"),
    "a noun hidden in what": re.compile(r"\bwhat\b(?![^.!?]*\?)", re.IGNORECASE),
    "a place for a relation: behind, beside, home, lies, stands": re.compile(
        r"\b(?:behind|beside|home|lies|stands)\b", re.IGNORECASE
    ),
    "a riddle of quantity: so many, as much": re.compile(r"\b(?:so|as) (?:many|much|few|little)\b(?!-)", re.IGNORECASE),
    "an idiom that no library has": re.compile(
        r"\banew\b|\balone\b|\bin place of\b|\bthe begin\b"
        r"|\bwhole(?=[.,;:)]|$| or\b| and\b)"
        r"|(?<!there )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|fewer\b|better\b)"
        r"|\b(?:ask|call|do|decide|name|read|say|set|tell|work|write)(?:s|ed|n)? otherwise\b"
        r"|\b(?:called|done|said|told|written) otherwise\b",
        re.IGNORECASE,
    ),
    "a chain of three pronouns in a sentence": re.compile(
        r"(?:\b(?:it|its|they|them|their|theirs|those|these|ones)\b[^.!?;:]*){3}", re.IGNORECASE
    ),
}
"""Habits of this code's early English that other projects do not have, by name. The word "what" is fine in
questions.
"""

NO_VERB = "a docstring of a function that begins without a verb"
"""The habit of DIALECT that needs the syntax tree: ``VERBS`` has the verbs, properties are nouns."""

VERBS = frozenset(
    re.findall(
        r"\w+",
        """
    abandon abort accept accumulate acknowledge acquire add admit adopt advance align allocate allow answer append apply
    arrange ask assemble assert assign attach attend await balance begin bind bisect block bound bring broadcast build
    call cancel carry cast change charge check choose claim clean clear close code collect combine commit compact
    compare compile complain complete compress compute concatenate confirm connect consider consume contain continue
    convert copy count create cut decide declare decode decorate decrease delay delete deliver dequantize derive
    describe detach detect determine disable discard dismiss dispatch divide do donate download drain draw drop dump
    embed emit empty enable encode end enqueue ensure enter escape estimate evict examine exchange execute exit expand
    expect expire explain export extend extract fail feed fetch fill filter find finish fit flatten flush fold follow
    forget fork format forward free freeze gather generate get give go grant group grow guard guess halve hand handle
    hash hide hold ignore import include increase index infer inherit initialise insert inspect install interleave
    invalidate iterate join judge keep kill label launch learn leave let lift limit link list listen load lock log look
    lower make mark mask match measure mend merge move multiply name normalise note notice notify number obey observe
    offer open order overwrite pack pad page parse pass patch pause perform permute pick pin place plan plot pool pop
    predict preempt prefer prepare print probe process produce project promise propose prove provide prune publish pull
    push put quantize query queue quit quote raise rank read rearrange rebuild receive reclaim recompute reconnect
    record recount recover reduce refer refresh refuse register reject relay release reload remember remove rename
    render repack repair repeat replace replay reply report request require reserve reset reshape resolve restart
    restore resume retire retry return reuse revalue revert rewrite rotate round route run sample sanitise save say
    scale scan scatter schedule score search seed select send separate serialise serve set settle shape share shift show
    shrink shuffle shut sign signal simulate size skip sleep slice solve sort spawn spend split spread square stack
    stage start state stay step stop store stream strip submit subscribe subtract sum summarise suspend swap sweep
    switch sync take talk tell terminate test throw tick tidy tie tile time tokenize touch trace track transfer
    translate transpose treat trim truncate try tune turn undo unescape unload unlock unpack unpause unpin unquote
    update upload use validate verify visit wait wake walk warm warn watch weigh widen withdraw work wrap write yield
    zero map view
        """,
    )
)
"""First words of docstrings, in base form. A verb that is missing is added here."""

NO_NOUN = "a variable, parameter or attribute whose name is no noun: one, at, asked, given, held"
"""The habit of DIALECT that counts names instead of words: ``EMPTY_NAMES``, once for each place that binds such a
name.
"""

EMPTY_NAMES = frozenset({"one", "at", "asked", "given", "held"})
"""Names that say nothing about their value. The noun of the value replaces them, such as ``page`` or ``position``."""

PERSONS = re.compile(
    r"\b(who|whoever|whom|whomever|nobody|somebody|everybody|anybody|someone|everyone|anyone"
    r"|no one|he|his|him)\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"``.*?``|`[^`]*`")
_FENCE = re.compile(r"^( *)```.*?^ *```", re.DOTALL | re.MULTILINE)
_LIST_ITEM = re.compile(r"\s*(?:[-*] |\d+[.)] )")
_COMMENT_C = re.compile(r"//\s?(.*)$")
_LINK_TARGET = re.compile(r"\]\([^)]*\)")


def paragraphs_of(text: str) -> list[str]:
    """Return the paragraphs of a docstring or comment, without indented lines, pictures and examples."""
    lines = text.split("\n")
    paragraphs: list[str] = []
    current: list[str] = []
    for number, line in enumerate(lines):
        words = line.strip()
        picture = (
            not words
            or (number and line.startswith("    "))
            or "-->" in words
            or words.startswith(("|", "+--", ">>>", "```"))
        )
        if picture or (current and _LIST_ITEM.match(words)):
            if current:
                paragraphs.append(" ".join(current))
            current = []
        if not picture:
            current.append(words)
    return [*paragraphs, " ".join(current)] if current else paragraphs


def _joined_comments(comments: list[tuple[int, str]], glue: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment; comments on consecutive lines are one text."""
    texts: list[list[str]] = []
    starts: list[int] = []
    last = -1
    for line, text in comments:
        if texts and line == last + 1:
            texts[-1].append(text)
        else:
            starts.append(line)
            texts.append([text])
        last = line
    return zip(starts, (glue.join(parts) for parts in texts), strict=True)


@functools.lru_cache(maxsize=1)
def _nodes(text: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a Python file. Each measure of a file walks them: the last file is parsed once."""
    return tuple(ast.walk(ast.parse(text)))


@functools.cache
def _python_texts(text: str) -> tuple[tuple[int, str], ...]:
    """Return line and text of each docstring and comment. Two tests read those of all files; cutting a file into
    tokens takes most of their time."""
    docstrings = [
        (node.lineno, value.replace("\n" + " " * node.col_offset, "\n"))
        for node in _nodes(text)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(value := node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [(token.start[0], token.string.lstrip("# ")) for token in tokens if token.type == tokenize.COMMENT]
    return (*docstrings, *_joined_comments(comments, " "))


def without_code_blocks(markdown: str) -> str:
    """Return the page with empty lines instead of its code blocks, so line numbers stay the same."""
    return _FENCE.sub(lambda match: "\n" * match.group(0).count("\n"), markdown)


def _markdown_texts(text: str) -> Iterator[tuple[int, str]]:
    start, words = 0, ""
    for number, line in enumerate([*without_code_blocks(text).split("\n"), ""], 1):
        ends = not line.strip() or line.startswith(("|", "#")) or _LIST_ITEM.match(line)
        if ends and words:
            yield start, words
            words = ""
        if line.strip() and not line.startswith("|"):
            start, words = (start, f"{words} {line.strip()}") if words else (number, line.strip())
    for number, line in enumerate(without_code_blocks(text).split("\n"), 1):
        if line.startswith("|"):
            yield from ((number, cell.strip()) for cell in line.strip("|").split("|"))


def _c_texts(text: str) -> Iterator[tuple[int, str]]:
    comments = [
        (number, match.group(1))
        for number, line in enumerate(text.split("\n"), 1)
        if (match := _COMMENT_C.search(line))
    ]
    return _joined_comments(comments, "\n")


def prose_complaints(source: Source) -> list[str]:
    """Return a complaint for each person as a subject in a file of Python, C++ or Markdown."""
    texts: Iterable[tuple[int, str]]
    if source.path.endswith(".py"):
        texts = _python_texts(source.text)
    elif source.path.endswith(".md"):
        texts = _markdown_texts(source.text)
    else:
        texts = _c_texts(source.text)
    complaints = []
    for line, text in texts:
        for paragraph in paragraphs_of(text):
            plain = _CODE.sub("X", paragraph)
            complaints += [
                f"{source.path}:{line}: the word {match.group(0)!r} in: "
                f"{plain[max(0, match.start() - 30) : match.end() + 30]}"
                for match in PERSONS.finditer(plain)
            ]
    return complaints


@functools.lru_cache(maxsize=1)
def _texts(source: Source) -> list[str]:
    is_python = source.path.endswith(".py")
    texts: Iterable[tuple[int, str]] = _python_texts(source.text) if is_python else _markdown_texts(source.text)
    return [_CODE.sub("X", part) for _, text in texts for part in paragraphs_of(text)]


def words_of(source: Source) -> int:
    """Return the number of words in the docstrings and comments of a Python file, or in a page."""
    return sum(len(text.split()) for text in _texts(source))


def is_verb(word: str) -> bool:
    """Return whether a docstring's first word is one of ``VERBS``, in base form or third person."""
    low = word.rstrip(".,:;").lower()
    bases = {low, low.removesuffix("s"), low.removesuffix("es"), re.sub(r"ies$", "y", low)}
    return word[:1].isupper() and not bases.isdisjoint(VERBS)


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def verbless_functions(source: Source) -> list[tuple[int, str]]:
    """Return line and first sentence of each function's docstring that begins without a verb."""
    return [
        (node.lineno, docstring.split("\n")[0])
        for node in _nodes(source.text)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not _is_property(node)
        and (docstring := ast.get_docstring(node))
        and not is_verb(docstring.split()[0])
    ]


def empty_names(source: Source) -> list[tuple[int, str]]:
    """Return line and name of each binding of one of ``EMPTY_NAMES``, by an assignment, a loop, a parameter or a
    field."""
    found = []
    for node in _nodes(source.text):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.append((node.lineno, name))
            case ast.FunctionDef(name=name) if _is_property(node):
                found.append((node.lineno, name))
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.ExceptHandler(name=str(name)):
                found.append((node.lineno, name))
    return sorted((line, name) for line, name in found if name in EMPTY_NAMES)


def dialect_counts(source: Source) -> dict[str, int]:
    """Return how often each habit of DIALECT, NO_VERB and NO_NOUN occurs in a Python file or a page."""
    texts = _texts(source)
    counts = {name: sum(len(pattern.findall(text)) for text in texts) for name, pattern in DIALECT.items()}
    if not source.path.endswith(".py"):
        return {**counts, NO_VERB: 0, NO_NOUN: 0}
    return {**counts, NO_VERB: len(verbless_functions(source)), NO_NOUN: len(empty_names(source))}


def width_complaints(page: Source) -> list[str]:
    """Return a complaint for each line of Markdown and each cell of a table that is too long."""
    complaints = []
    for number, line in enumerate(without_code_blocks(page.text).split("\n"), 1):
        if line.startswith("|"):
            cells = [len(_LINK_TARGET.sub("]", cell.strip())) for cell in line.strip("|").split("|")]
            complaints += [
                f"{page.path}:{number}: a cell of {cell} characters" for cell in cells if cell > TABLE_CELL_MAX
            ]
        elif len(line) > MARKDOWN_LINE_MAX:
            complaints.append(f"{page.path}:{number}: {len(line)} characters")
    return complaints
