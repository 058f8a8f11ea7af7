"""A checkpoint of ``benchmarks.serve.checkpoints`` as llama.cpp reads it; run by the peers' environment.

    python to_gguf.py LLAMA_SOURCES CHECKPOINT OUT bf16|f32|q8_0 [--any-vocabulary]

``--any-vocabulary``: each architecture takes the made-up one, in place of the kind that its releases have.

llama.cpp's own conversion does the work. Its script knows tokenizers by fingerprint and wants merges; ours is
made up and has none, and prompts are token ids: so it is told that the tokenizer is like GPT-2's, with one
merge that nothing uses. Tokens that are part of a character get names of their own: the server would hold
back their ids until the character is whole, and they could not be counted.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any


def subclasses(kind: type[Any]) -> set[type[Any]]:
    return {below for own in kind.__subclasses__() for below in (own, *subclasses(own))}


def main() -> None:
    sources, checkpoint, out, kind = sys.argv[1:5]
    sys.path[:0] = [sources, str(Path(sources) / "gguf-py")]
    import conversion
    import convert_hf_to_gguf
    import gguf
    from conversion import base
    from tokenizers import decoders

    def like_gpt2(self: Any, tokenizer: Any) -> str:
        return "gpt-2"

    base.TextModel.get_vocab_base_pre = like_gpt2
    read = base.TextModel.get_vocab_base

    def read_whole_characters(self: Any) -> tuple[list[str], list[int], str]:
        tokens, kinds, pre = read(self)
        decoder = decoders.ByteLevel()
        names = [
            f"Ġpart{index}" if "\N{REPLACEMENT CHARACTER}" in decoder.decode([token]) else token
            for index, token in enumerate(tokens)
        ]
        return names, kinds, pre

    base.TextModel.get_vocab_base = read_whole_characters
    if "--any-vocabulary" in sys.argv:
        for module in pkgutil.iter_modules(conversion.__path__):
            with contextlib.suppress(ImportError):  # of libraries for formats that nobody here has
                importlib.import_module(f"conversion.{module.name}")
        for model in subclasses(base.ModelBase):
            if "set_vocab" in vars(model):
                model.set_vocab = base.TextModel._set_vocab_gpt2
    vocabulary: Any = gguf.SpecialVocab
    load = vocabulary.__init__

    def load_with_a_merge(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        self.merges = self.merges or ["Ġ w"]

    vocabulary.__init__ = load_with_a_merge
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    no_heads = ["--no-mtp"] if config["model_type"].startswith("qwen3_5") else []
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", out, "--outtype", kind, *no_heads]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
