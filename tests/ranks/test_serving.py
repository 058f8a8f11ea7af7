"""``weft serve --tp 2`` as a user has it: a rank is killed in the middle of a stream, which goes on."""

from __future__ import annotations

import re

import psutil

from tests.fixtures.checkpoints import checkpoint
from tests.server.running import eventually, running_server

BODY = {"model": "default", "prompt": [5, 99, 7, 230], "max_tokens": 1200, "temperature": 0.8, "seed": 3,
        "stream": True, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


def test_a_stream_outlives_a_killed_rank() -> None:
    """The line in the log names the rank; the text is that of an undisturbed run."""
    engine = {"model": str(checkpoint("lfm2")), "tp": 2, "threads": 1, "memory": "8MiB",
              "max_model_len": 2048}
    with running_server("", engine=engine) as server:
        undisturbed = "".join(chunk.choices[0].text for chunk in server.client().completions.create(**BODY))
        ranks = [child for child in psutil.Process(server.engine_pid()).children()
                 if "weft.assemble.rank_process" in child.cmdline()]
        assert len(ranks) == 1
        text = ""
        for number, chunk in enumerate(server.client().completions.create(**BODY)):
            text += chunk.choices[0].text
            if number == 5:
                ranks[0].kill()
        assert text == undisturbed
        metrics = server.get("/metrics").text
        assert 'ranks{engine="0"' in metrics
        assert re.search(r'request_resumes_total{[^}]*} 1\.0', metrics)
        assert eventually(lambda: "rank 1 was ended by signal 9" in server.output)
        server.interrupt()
        assert server.exit_code() == 0
