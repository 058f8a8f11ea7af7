"""Flags for how tokens are chosen: the fields of SamplingParams that make sense for one answer.

A flag that is not given stays out of the request, so that the model's own generation defaults hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from weft.config_check import flag_name

SAMPLING_FLAGS: dict[str, tuple[click.ParamType[Any], str]] = {
    "max_tokens": (click.INT, "Most tokens of the answer."),
    "temperature": (click.FLOAT, "0 takes the likeliest token; higher is more varied."),
    "top_p": (click.FLOAT, "Choose among the likeliest tokens that together reach this probability."),
    "top_k": (click.INT, "Choose among this many of the likeliest tokens; 0: all."),
    "min_p": (click.FLOAT, "Drop tokens below this share of the likeliest one's probability."),
    "repetition_penalty": (click.FLOAT, "Above 1, tokens of prompt and answer get less likely."),
    "presence_penalty": (click.FLOAT, "Above 0, tokens of the answer get less likely, once each."),
    "frequency_penalty": (click.FLOAT, "Above 0, tokens of the answer get less likely, each time."),
    "min_tokens": (click.INT, "Fewest tokens before the model may end."),
    "stop": (click.STRING, "End before this text; may be given several times."),
}
"""Field of SamplingParams -> type and help."""


def sampling_parameters() -> list[click.Parameter]:
    return [click.Option([flag_name(name)], type=kind, help=sentence, multiple=name == "stop")
            for name, (kind, sentence) in SAMPLING_FLAGS.items()]


def given_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields that were given, ready for a request or for SamplingParams."""
    return {name: values[name] for name in SAMPLING_FLAGS if values.get(name) not in (None, ())}
