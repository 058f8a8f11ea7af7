"""What a page leaves to its reader: names that its programs use and do not define."""

from __future__ import annotations

PRELUDES = {
    "docs/refit.md": "from weft import Engine\n",
    "docs/python.md": "from weft import Engine, SamplingParams\n",
    "docs/quantization.md": "import weft\n",
    "docs/store.md": "import weft\n",
    "docs/memory.md": """\
import os
from openai import OpenAI
from weft.families import read_spec
from weft.memory.frames.plan import plan_arena
from weft.memory.memory import Memory
from weft.planning.geometries import find_geometry
client = OpenAI(base_url=os.environ["WEFT_URL"] + "/v1", api_key="none")
HANDBOOK, question = "Rules. " * 40, "What is today?"
tokens = list(range(10, 30)) * 175
spec = read_spec(find_geometry("LFM2-1.2B").config)
memory_bytes, seq = 64 << 20, 1
prompt = list(range(2000))
""",
}
