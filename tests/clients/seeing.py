"""Writes a tiny checkpoint that sees pictures: ``python -m tests.clients.seeing DIRECTORY``."""

import sys
from pathlib import Path

from tests.fixtures.vision_checkpoints import make_vision_checkpoint
from tests.server.test_pictures import TEMPLATE

directory = Path(sys.argv[1])
directory.mkdir()
make_vision_checkpoint(directory, "lfm2_vl")
(directory / "chat_template.jinja").write_text(TEMPLATE)
