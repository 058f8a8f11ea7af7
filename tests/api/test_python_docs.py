"""The examples of docs/python.md, run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fixtures.checkpoints import checkpoint, make_checkpoint

TOOLS_TEMPLATE = Path(__file__).parents[1] / "fixtures" / "family_templates" / "hermes_think.jinja"
PAGE = Path(__file__).parents[2] / "docs" / "python.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_of_the_page_runs_and_prints(number, capsys, tmp_path):
    directory = checkpoint("qwen3_5")
    if "tools" in EXAMPLES[number]:
        directory = make_checkpoint(tmp_path / "with-tools", "qwen3_5")
        (directory / "chat_template.jinja").write_text(TOOLS_TEMPLATE.read_text(encoding="utf-8"))
    code = EXAMPLES[number].replace("path/to/checkpoint", str(directory))
    code = code.replace('")', '", memory="8MiB")', 1) if "memory=" not in code else code
    imports = "from weft import Engine, SamplingParams\n"
    exec(compile(imports + code, f"{PAGE.name}, example {number}", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_every_sampling_field_is_on_the_page():
    from weft import SamplingParams

    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in SamplingParams.__struct_fields__ if f"`{name}`" not in text and
            f"`{name}=" not in text] == []
