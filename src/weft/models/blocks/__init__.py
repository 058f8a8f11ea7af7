"""Blocks of models: weights in plain attributes, and one ``__call__`` over a step's tokens.

A mixer takes (x_TD, inputs, cache, rotary) and returns y_TD; a feed-forward takes x_TD and returns y_TD.
Blocks know no tensor names: a family file reads weights (see ``weft.models.weights``) and hands them over.
"""
