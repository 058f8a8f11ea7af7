"""A harmless template, rendered in the server's own process within a small budget.

    conversation --InlineTemplate.write--> ChatPrompt      what the worker would write, in a tenth of the time
                                     '---> None            the worker renders it, or refuses it

A round trip to the worker process costs several hundred microseconds, a usual rendering some tens. Templates
that pass ``template_check.is_harmless`` are first tried here. Each try has a budget of work, of time and of
the length of one text:

    an iteration of a loop             1, and the template's own text in it
    a call, a filter, an output        1
    a text that grows                  its length

A conversation that spends the budget, fails or is refused goes to the worker, which has the limits and the
messages of errors. So this module decides about time alone and never about an answer.

The budget is enforced inside the rendering. Loops, parts of ``~`` and captured blocks are rewritten in the
syntax tree to pass through counting filters. Outputs, calls and operators pass through hooks of the sandbox.

Laws: L11 (a rendering here ends within BUDGET_S and the operation that runs then).

Rejected: a thread with a timer (a loop in Python cannot be stopped from another thread); rendering here
without a budget (nested loops over messages are harmless in form and take minutes); the clock of the thread
instead of the wall's (a machine that stands still sends a conversation to the worker, which costs little).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context, Undefined
from jinja2.utils import Namespace

from weft.errors import WeftError
from weft.text.chat import ChatMessage, ChatTemplate, TemplateEnvironment, WorkBudgetError
from weft.text.template_check import FILTERS, FUNCTIONS, TESTS
from weft.text.template_worker import ChatPrompt, chat_prompt

INLINE_BYTES = 16 << 10
"""Of a conversation, as the worker gets it; a larger one goes to the worker at once."""
BUDGET_S = 0.01
WORK_MAX = 20_000
TEXT_CHARS_MAX = 65_536
"""Of one text that a template makes."""
_CHARS_PER_WORK = 64
_NUMBER_MAX = 10**9
_RANGE_MAX = 1000
_LOOP, _TEXT, _PART = "counted loop", "counted text", "counted part"
"""Filters that no template can name."""
PAUSE = 16
"""Conversations that go to the worker at once after one that spent the budget."""
_LITTLE_WORK = 1000
"""Less than this takes no time: it was the machine that stood still."""


class _CountingEnvironment(TemplateEnvironment):
    """The operations of harmless templates alone, and a budget that they spend."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%"})

    def __init__(self) -> None:
        super().__init__()
        self.finalize = self._shown
        self.filters = {name: self._counted(self.filters[name]) for name in FILTERS}
        self.filters |= {_LOOP: self._loop, _TEXT: self._text, _PART: self._shown}
        tests: Mapping[str, Any] = self.tests
        self.tests = {name: self._counted(tests[name]) for name in TESTS}
        self.globals = {name: value for name, value in self.globals.items() if name in FUNCTIONS}
        self.work_left = self._end_s = math.inf  # constants are folded while a template is compiled

    def begin(self) -> None:
        self.work_left = WORK_MAX
        self._end_s = time.perf_counter() + BUDGET_S

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._spend(1)
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, range) and len(result) > _RANGE_MAX:
            raise WorkBudgetError
        return self._text(result) if isinstance(result, str) else result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            return self._text(left + right)
        if not all(isinstance(side, int | float) and abs(side) <= _NUMBER_MAX for side in (left, right)):
            raise WorkBudgetError  # lists that grow, texts that are multiplied or formatted
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        _count_work(source)
        return super()._generate(source, *args, **kwargs)

    def _spend(self, work: int) -> None:
        """Raises WorkBudgetError."""
        self.work_left -= work
        if self.work_left < 0 or time.perf_counter() > self._end_s:
            raise WorkBudgetError

    def _shown(self, value: Any) -> Any:
        """A value that becomes a part of a text. Lists and objects are refused: their texts may be long."""
        if isinstance(value, str):
            self._spend(1 + len(value) // _CHARS_PER_WORK)
        elif value is None or isinstance(value, int | float | Undefined):
            self._spend(1)
        else:
            raise WorkBudgetError
        return value

    def _text(self, text: Any) -> Any:
        if len(text) > TEXT_CHARS_MAX:
            raise WorkBudgetError
        self._spend(1 + len(text) // _CHARS_PER_WORK)
        return text

    def _loop(self, values: Iterable[Any], work: int) -> Iterator[Any]:
        for value in values:
            self._spend(work)
            yield value

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or test. A namespace in a namespace has no short text."""
        @functools.wraps(operation)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._spend(1)
            if any(isinstance(value, Namespace) for value in args):
                raise WorkBudgetError
            result = operation(*args, **kwargs)
            return self._text(result) if isinstance(result, str) else result

        return run


class InlineTemplate:
    """``source`` is harmless, and ``ChatTemplate`` has accepted it elsewhere."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], origin: str) -> None:
        self._environment = _CountingEnvironment()
        self._template = ChatTemplate(source, special_tokens=special_tokens, origin=origin,
                                      environment=self._environment)
        self._pause = 0

    def write(self, messages: list[ChatMessage], **job: Any) -> ChatPrompt | None:
        """As ``weft.text.template_worker.chat_prompt``; None where that is for the worker to find out."""
        if self._pause:
            self._pause -= 1
            return None
        self._environment.begin()
        try:
            prompt = chat_prompt(self._template, messages, **job)
            prompt.text.encode()
        except WorkBudgetError:
            if self._environment.work_left < WORK_MAX - _LITTLE_WORK:
                self._pause = PAUSE
            return None
        except (WeftError, UnicodeEncodeError):
            return None
        return prompt


def _count_work(tree: nodes.Node) -> None:
    """Rewrites ``tree``: the values of loops, the parts of ``~`` and captured blocks pass through filters."""
    for node in list(tree.find_all((nodes.For, nodes.Concat, nodes.AssignBlock))):
        match node:
            case nodes.For():
                chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
                work = nodes.Const(1 + chars // _CHARS_PER_WORK)
                node.iter = _filtered(node.iter, _LOOP, [work])
            case nodes.Concat():
                node.nodes = [_filtered(part, _PART, []) for part in node.nodes]
            case nodes.AssignBlock():
                node.filter = _filtered(node.filter, _TEXT, [])


def _filtered(value: Any, name: str, args: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(value, name, args, [], None, None)
