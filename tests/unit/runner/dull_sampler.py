"""The sampler's dull twin: one row, one token, numpy, the definitions written down one after the other."""

from __future__ import annotations

import math

import numpy as np

from weft.request import SamplingParams

MASK = (1 << 64) - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = mix((seed + golden) & MASK)
    return (mix((key + (position + 1) * golden) & MASK) >> 11) * 2.0**-53


def edited(
    logits: np.ndarray, sampling: SamplingParams, prompt: list[int], output: list[int], stop_ids: tuple[int, ...]
) -> np.ndarray:
    logits = logits.astype(np.float64).copy()
    if len(output) < sampling.min_tokens:
        logits[list(stop_ids)] = -math.inf
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    for token in set(prompt) | set(output):
        r = sampling.repetition_penalty
        logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
    for token in set(output):
        logits[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    for *head, last in sampling.banned_sequences:
        if output[len(output) - len(head) :] == head:
            logits[last] = -math.inf
    if sampling.allowed_token_ids:
        others = np.ones(len(logits), bool)
        others[list(sampling.allowed_token_ids)] = False
        logits[others] = -math.inf
    return logits


def distribution(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p and min-p; tokens that tie share their fate."""
    p = np.exp((logits - logits.max()) / sampling.temperature)
    if sampling.top_k > 0:
        kth = np.sort(p)[::-1][min(sampling.top_k, len(p)) - 1]
        p = np.where(p >= kth, p, 0.0)
    p /= p.sum()
    if sampling.top_p < 1.0:
        kept = np.array([p[p > value].sum() < sampling.top_p for value in p])
        kept |= p == p.max()
        p = np.where(kept, p, 0.0)
    p = np.where(p >= sampling.min_p * p.max(), p, 0.0)
    return p / p.sum()


def choose(
    logits: np.ndarray,
    sampling: SamplingParams,
    prompt: list[int],
    output: list[int],
    seed: int,
    stop_ids: tuple[int, ...] = (),
) -> int:
    logits = edited(logits, sampling, prompt, output, stop_ids)
    if sampling.greedy:
        return int(np.argmax(logits))
    p = distribution(logits, sampling)
    target = uniform(seed, len(prompt) + len(output)) * p.sum()
    return int(np.searchsorted(np.cumsum(p), target, side="right"))
