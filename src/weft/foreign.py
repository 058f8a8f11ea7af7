"""Flags and verbs of other engines that users may try, and their counterparts here.

Every row says why a flag does not exist here, and which setting to use instead. One table holds all rows, so that every
message can be read and corrected in one place.

    because           instead                 sentence
    a reason          --memory                X is not supported here, because ...; nearest: --memory
    a reason          leave it out            X is not supported here, because ...; leave it out
    _OTHER_NAME       --tp                    X has another name here: --tp

``instead`` begins with one of weft's own flags or settings (a test compares them), or is advice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Foreign:
    because: str
    instead: str


_BY_WIDTH = "layers are divided over ranks by their width, and never by their number"
_ONE_POOL = "KV pages and recurrent states share one memory that is given in bytes"
_FRAMES = "pages have 16 tokens and states have slots of their own, so there is no block size to tune"
_OTHER_NAME = ""
"""Reason of a flag that exists here under another name: none is needed."""
_OWN_CODE = "model code ships with weft and checkpoints cannot bring their own"
_EAGER = "decode steps are recorded as CUDA graphs where the model allows it, and nothing is compiled"
_OWN_SOURCES = "drafts come from the text itself, with no second model"
_FROM_CHECKPOINT = "this is read from the checkpoint"
_KERNELS = "there is one kernel for each op on each kind of device"
_WHOLE = "each model is on one device"
_BUDGET = "decodes and prefill chunks share one token budget per step"
_LEAVE_OUT = "leave it out"

FOREIGN_FLAGS: dict[str, Foreign] = {
    # memory
    "--gpu-memory-utilization": Foreign("its share is of all memory, weights included", "--gpu-memory-fraction"),
    "--kv-cache-memory-bytes": Foreign(_ONE_POOL, "--memory"),
    "--mem-fraction-static": Foreign(_OTHER_NAME, "--gpu-memory-fraction"),
    "--num-gpu-blocks-override": Foreign(_ONE_POOL, "--memory"),
    "--swap-space": Foreign("sequences that must wait are computed again, never swapped", "--memory"),
    "--cpu-offload-gb": Foreign(_WHOLE, "--memory"),
    "--kv-offloading-size": Foreign("prefixes evicted from the arena go to disk", "--store"),
    "--block-size": Foreign(_FRAMES, _LEAVE_OUT),
    "--page-size": Foreign(_FRAMES, _LEAVE_OUT),
    "--kv-cache-dtype": Foreign(_OTHER_NAME, "--kv-dtype"),
    "--cache-type-k": Foreign(_OTHER_NAME, "--kv-dtype"),
    "--cache-type-v": Foreign(_OTHER_NAME, "--kv-dtype"),
    "--slot-save-path": Foreign("every prefix is saved, without a call", "--store"),
    "--mlock": Foreign("weights are read into memory at start", _LEAVE_OUT),
    "--no-mmap": Foreign("weights are read into memory at start", _LEAVE_OUT),
    # states
    "--checkpoints": Foreign(_OTHER_NAME, "--snapshots"),
    "--mamba-cache-mode": Foreign(
        "states are kept one by one, where they are useful ('none' there is none "
        "here, 'align' is prompt, or auto to find more, 'all' is every:N)",
        "--snapshots",
    ),
    "--mamba-block-size": Foreign(
        "there are no blocks of states (its N is the N of every:N, any multiple of 64)", "--snapshots"
    ),
    "--prefix-match-unit": Foreign(
        "prefixes are compared token by token and go on from any state that was "
        "kept; every:N says how far apart states are",
        "--snapshots",
    ),
    "--attn-pack-size": Foreign("a page is 16 tokens of all attention layers, whatever a state weighs", _LEAVE_OUT),
    "--mamba-cache-dtype": Foreign(_OTHER_NAME, "--state-dtype"),
    "--mamba-ssm-cache-dtype": Foreign(_OTHER_NAME, "--state-dtype"),
    "--mamba-ssm-dtype": Foreign(_OTHER_NAME, "--state-dtype"),
    "--mamba-backend": Foreign(_KERNELS, _LEAVE_OUT),
    "--gdn-prefill-backend": Foreign(_KERNELS, _LEAVE_OUT),
    # prefix cache
    "--enable-prefix-caching": Foreign(_OTHER_NAME, "--prefix-cache"),
    "--no-enable-prefix-caching": Foreign(_OTHER_NAME, "--no-prefix-cache"),
    "--disable-radix-cache": Foreign(_OTHER_NAME, "--no-prefix-cache"),
    "--prefix-caching-hash-algo": Foreign("prefixes are compared by their tokens, not by hashes", _LEAVE_OUT),
    "--enable-prompt-tokens-details": Foreign("cached_tokens is in the usage of every answer", _LEAVE_OUT),
    # schedule
    "--enable-chunked-prefill": Foreign("prefill is always chunked", "--max-num-batched-tokens"),
    "--no-enable-chunked-prefill": Foreign("prefill is always chunked", "--max-num-batched-tokens"),
    "--chunked-prefill-size": Foreign(_BUDGET, "--max-num-batched-tokens"),
    "--long-prefill-token-threshold": Foreign(_BUDGET, "--max-num-batched-tokens"),
    "--max-num-partial-prefills": Foreign(_BUDGET, "--max-num-batched-tokens"),
    "--max-prefill-tokens": Foreign(_BUDGET, "--max-num-batched-tokens"),
    "--batch-size": Foreign(_BUDGET, "--max-num-batched-tokens"),
    "--ubatch-size": Foreign(_BUDGET, "--max-num-batched-tokens"),
    "--max-running-requests": Foreign(_OTHER_NAME, "--max-num-seqs"),
    "--parallel": Foreign(_OTHER_NAME, "--max-num-seqs"),
    "-np": Foreign(_OTHER_NAME, "--max-num-seqs"),
    "--max-num-queued-reqs": Foreign(_OTHER_NAME, "limits.max_queued_requests of the --config file"),
    "--max-queued-reqs": Foreign(_OTHER_NAME, "limits.max_queued_requests of the --config file"),
    "--scheduling-policy": Foreign(
        "requests run by priority, then first come first served", "send `priority` in the request"
    ),
    "--schedule-policy": Foreign(
        "requests run by priority, then first come first served", "send `priority` in the request"
    ),
    "--schedule-conservativeness": Foreign("a prompt is admitted when all of it fits", "--memory"),
    "--async-scheduling": Foreign(_OTHER_NAME, "debug.overlap of the --config file"),
    "--disable-overlap-schedule": Foreign(_OTHER_NAME, "debug.overlap = 'off' of the --config file"),
    # length
    "--context-length": Foreign(_OTHER_NAME, "--max-model-len"),
    "--ctx-size": Foreign(_OTHER_NAME, "--max-model-len"),
    "-c": Foreign(_OTHER_NAME, "--max-model-len"),
    "--max-seq-len": Foreign(_OTHER_NAME, "--max-model-len"),
    # devices
    "--tensor-parallel-size": Foreign(_OTHER_NAME, "--tp"),
    "-tp": Foreign(_OTHER_NAME, "--tp"),
    "--tp-size": Foreign(_OTHER_NAME, "--tp"),
    "--pipeline-parallel-size": Foreign(_BY_WIDTH, "--tp"),
    "-pp": Foreign(_BY_WIDTH, "--tp"),
    "--data-parallel-size": Foreign(_OTHER_NAME, "--replicas"),
    "-dp": Foreign(_OTHER_NAME, "--replicas"),
    "--enable-expert-parallel": Foreign(_OTHER_NAME, "--ep"),
    "--distributed-executor-backend": Foreign("ranks are processes that the engine starts itself", _LEAVE_OUT),
    "--n-gpu-layers": Foreign(_WHOLE, "--device"),
    "-ngl": Foreign(_WHOLE, "--device"),
    "--flash-attn": Foreign(_KERNELS, _LEAVE_OUT),
    "-fa": Foreign(_KERNELS, _LEAVE_OUT),
    "--enforce-eager": Foreign(_OTHER_NAME, "debug.cuda_graphs = 'off' of the --config file"),
    "--compilation-config": Foreign(_EAGER, _LEAVE_OUT),
    "-O": Foreign(_EAGER, _LEAVE_OUT),
    "--cuda-graph-max-bs": Foreign(_EAGER, _LEAVE_OUT),
    "--disable-cuda-graph": Foreign(_OTHER_NAME, "debug.cuda_graphs = 'off' of the --config file"),
    "-t": Foreign(_OTHER_NAME, "--threads"),
    # model
    "--model-path": Foreign(_OTHER_NAME, "--model"),
    "-m": Foreign(_OTHER_NAME, "--model"),
    "-hf": Foreign(_OTHER_NAME, "--model"),
    "--hf-repo": Foreign(_OTHER_NAME, "--model"),
    "--tokenizer": Foreign(_FROM_CHECKPOINT, "put tokenizer.json into the directory of config.json"),
    "--tokenizer-mode": Foreign(_FROM_CHECKPOINT, _LEAVE_OUT),
    "--hf-overrides": Foreign(_FROM_CHECKPOINT, "edit config.json in the checkpoint"),
    "--generation-config": Foreign(
        "generation_config.json of the checkpoint gives the sampling defaults", "--default-sampling"
    ),
    "--trust-remote-code": Foreign(_OWN_CODE, _LEAVE_OUT),
    "--load-format": Foreign("safetensors and GGUF files are recognised by their content", "--model"),
    "--quantization": Foreign(_OTHER_NAME, "--quantize"),
    "-q": Foreign(_OTHER_NAME, "--quantize"),
    "--download-dir": Foreign("the hub cache is used", "set the variable HF_HOME"),
    "--enable-lora": Foreign("adapters are served once --lora names one", _LEAVE_OUT),
    "--max-loras": Foreign("the adapters that fit run at once", "limits.lora_memory of the --config file"),
    "--max-cpu-loras": Foreign("the adapters that fit stay in memory", "limits.lora_memory of the --config file"),
    "--lora-paths": Foreign(_OTHER_NAME, "--lora"),
    "--mm-processor-kwargs": Foreign(_FROM_CHECKPOINT, "edit preprocessor_config.json in the checkpoint"),
    "--limit-mm-per-prompt": Foreign(_OTHER_NAME, "limits.images of the --config file"),
    "--allowed-local-media-path": Foreign("the server opens no files for its clients", _LEAVE_OUT),
    "--allowed-media-domains": Foreign(_OTHER_NAME, "--media-domains"),
    "--mm-processor-cache-gb": Foreign(_OTHER_NAME, "limits.picture_rows of the --config file"),
    "--sampling-defaults": Foreign(_OTHER_NAME, "--default-sampling"),
    "--override-generation-config": Foreign(
        "sampling defaults come from generation_config.json, then from --default-sampling", "--default-sampling"
    ),
    # speculation, structure, tools
    "--speculative-config": Foreign(_OWN_SOURCES, "--speculate"),
    "--spec-method": Foreign(_OTHER_NAME, "--speculate"),
    "--speculative-algorithm": Foreign(_OTHER_NAME, "--speculate"),
    "--draft-model": Foreign(_OWN_SOURCES, "--speculate"),
    "--enable-auto-tool-choice": Foreign("tool calls are always read", "--tool-parser"),
    "--tool-call-parser": Foreign(_OTHER_NAME, "--tool-parser"),
    "--enable-reasoning": Foreign("reasoning is always separated", "--reasoning-parser"),
    "--structured-outputs-config": Foreign("llguidance compiles every grammar", _LEAVE_OUT),
    "--guided-decoding-backend": Foreign("llguidance compiles every grammar", _LEAVE_OUT),
    "--grammar": Foreign("it belongs to a request", "send `guided_grammar` in the request"),
    "--json-schema": Foreign("it belongs to a request", "send `response_format` in the request"),
    "--constrained-decoding-backend": Foreign("llguidance compiles every grammar", _LEAVE_OUT),
    "--grammar-backend": Foreign("llguidance compiles every grammar", _LEAVE_OUT),
    "--jinja": Foreign("chat templates are always rendered", _LEAVE_OUT),
    # server
    "--allowed-origins": Foreign(_OTHER_NAME, "--allowed-origin"),
    "--root-path": Foreign("the API is served at /", "strip the prefix in the proxy"),
    "--ssl-cert-reqs": Foreign("clients must show a certificate that server.ssl_ca_certs has signed", _LEAVE_OUT),
    "--enable-ssl-refresh": Foreign("a certificate that changes is read again", _LEAVE_OUT),
    "--ssl-cert-file": Foreign(_OTHER_NAME, "--ssl-certfile"),
    "--ssl-key-file": Foreign(_OTHER_NAME, "--ssl-keyfile"),
    "--enable-request-id-headers": Foreign("every answer has X-Request-Id", _LEAVE_OUT),
    "--enable-log-requests": Foreign("the log level info has one line per request", "--log-level"),
    "--disable-log-requests": Foreign("the log level info has one line per request", "--log-level"),
    "--no-enable-log-requests": Foreign("the log level info has one line per request", "--log-level"),
    "--uvicorn-log-level": Foreign("there is one log", "--log-level"),
    "--sse-keep-alive-interval": Foreign(_OTHER_NAME, "limits.sse_keep_alive of the --config file"),
    "--disable-log-stats": Foreign("/metrics costs nothing until it is read", _LEAVE_OUT),
    "--otlp-traces-endpoint": Foreign(_OTHER_NAME, "--otlp-endpoint"),
    "--enable-sleep-mode": Foreign("every server can sleep: POST /sleep", _LEAVE_OUT),
    "--api-server-count": Foreign(_OTHER_NAME, "--http-workers"),
    "--n-predict": Foreign("it belongs to a request", "send `max_tokens` in the request"),
}

FOREIGN_VERBS: dict[str, str] = {
    "launch": "type `weft serve MODEL`",
    "launch_server": "type `weft serve MODEL`",
    "start": "type `weft serve MODEL`",
    "complete": "type `weft generate PROMPT`",
    "download": "type `weft pull NAME`",
    "models": "type `weft list` for models on disk, `weft ps` for running ones",
    "ls": "type `weft list`",
    "show": "type `weft plan MODEL`",
    "create": "send it to a running server: POST /api/create",
    "collect-env": "type `weft doctor --json`",
    "env": "type `weft doctor`",
}


def foreign_flag(typed: str) -> Foreign | None:
    """Return the row for a flag as typed (``--gpu_memory_utilization`` counts too), or None."""
    name = "--" + typed[2:].replace("_", "-") if typed.startswith("--") else typed
    return FOREIGN_FLAGS.get(name)


def foreign_sentence(typed: str, foreign: Foreign) -> str:
    if foreign.because == _OTHER_NAME:
        return f"{typed} has another name here: {foreign.instead}"
    nearest = "nearest: " if foreign.instead.startswith(("--", "limits.")) else ""
    return f"{typed} is not supported here, because {foreign.because}; {nearest}{foreign.instead}"
