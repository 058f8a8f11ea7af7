"""Tools around the engine: replays of traffic, measurements, scores of models, quantized copies.

    commands    verbs of ``weft``, found by entry point: simulate, bench, eval, quantize
    sim         replays of recorded traffic in virtual time: hits of the cache
    bench       the speed of kernels, the engine and a server
    eval        tasks whose answers are known
    quantize    a checkpoint in fewer bits, as safetensors or GGUF

``weft`` serves without this package and never imports it; this package imports ``weft`` freely.
"""
