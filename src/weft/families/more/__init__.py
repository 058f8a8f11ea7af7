"""Families that are rarely served, each with its kind of layer where no other family has it."""
