"""Facts that determine an engine's output. A replica that joins a fleet must have the same, and the ranks of an engine
the same files.

    weights      digest over all bytes of the weight files (``weft.store.identity``)
    config       digest of config.json         tokenizer    digest of the vocabulary
    dtype, kv_dtype, state_dtype, quantize     the forms in which the model computes
    max_model_len                              so that a request that one replica accepts fits all
    version                                    weft's

Each value is short text, so that a refusal can show both sides.

The digest is computed on a thread of its own (``WeightsReading``), which begins before torch is imported: the pages
that it brings into the page cache are those that the loader reads next. The files must be unchanged when the digest is
done, so that it is the digest of the bytes that were loaded.
"""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from weft.config import EngineConfig
from weft.errors import CheckpointError
from weft.memory.frames.plan import ArenaPlan
from weft.store.file_digests import FileFacts, check_unchanged
from weft.store.identity import weights_digest
from weft.text.tokenizer_file import tokenizer_digest, tokenizer_path
from weft.version import weft_version

if TYPE_CHECKING:
    from weft.models.loading import LoadedModel

_DIGEST_CHARS = 12


def weight_files(directory: Path) -> list[Path]:
    """Return the files that weights are read from, and the index that lists their tensors. Raises CheckpointError."""
    from weft.models.safetensors_header import weight_files as listed_files

    gguf = sorted(directory.glob("*.gguf"))
    if gguf and not any(directory.glob("*.safetensors")):  # a view of such files
        return gguf
    files, listed, source = listed_files(directory)
    return [*files, source] if listed else files


class WeightsReading:
    """One reading of the weights in ``directory``. ``files``: the files that the weights are read from."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = weight_files(directory)
        try:
            self._before = [FileFacts.of(file) for file in self.files]
        except OSError as error:
            raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}", param="model") from None
        self._answer: Future[str] | None = None
        self._digest = ""

    def begin(self) -> None:
        """Compute the digest on a thread, while others read the files."""
        answer = self._answer = Future()

        def compute() -> None:
            try:
                answer.set_result(weights_digest(self.files))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=compute, name="weft-digest", daemon=True).start()

    def digest(self) -> str:
        """Wait for the digest and return it. Raises OSError, CheckpointError if a file has changed since the reading
        began.
        """
        if not self._digest:
            if self._answer is None:
                self.begin()
            assert self._answer is not None
            digest = self._answer.result()
            self.check()
            self._digest = digest
        return self._digest

    def check(self) -> None:
        """Raise CheckpointError if a file has changed since the reading began. Raises OSError."""
        if weight_files(self.directory) != self.files:
            raise CheckpointError(f"{self.directory}: other weight files are there now; try again", param="model")
        for file, before in zip(self.files, self._before, strict=True):
            check_unchanged(file, before)


def engine_identity(
    config: EngineConfig, directory: Path, weights: str, loaded: LoadedModel, arena: ArenaPlan, max_model_len: int
) -> dict[str, str]:
    """Return the identity of an engine by the name of each fact. ``weights``: the digest of the weights."""
    return {
        "weights": weights[:_DIGEST_CHARS],
        "config": file_digest(directory / "config.json"),
        "tokenizer": vocabulary_digest(directory),
        "dtype": loaded.spec.dtype,
        "kv_dtype": arena.kv_dtype,
        "state_dtype": config.state_dtype,
        "quantize": f"{loaded.weights_form}{'' if config.quantize_inputs else ', inputs as they are'}",
        "max_model_len": str(max_model_len),
        "version": weft_version(),
    }


def files_fingerprint(directory: Path) -> str:
    """Return a short text that is equal in two processes of one machine if they read the same weight files in the same
    state. Ranks compare it, because each reads only a share and only rank 0 computes the digest. Raises
    CheckpointError, OSError.
    """
    facts = [FileFacts.of(file) for file in weight_files(directory)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:_DIGEST_CHARS]


def vocabulary_digest(directory: Path) -> str:
    """Return a digest of tokenizer.json and of the tokens that files next to it add. Raises CheckpointError."""
    return tokenizer_digest(tokenizer_path(directory))[:_DIGEST_CHARS]


def file_digest(path: Path) -> str:
    """Return a digest of the file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGEST_CHARS]
