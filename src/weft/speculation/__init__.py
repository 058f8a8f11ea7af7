"""Speculation: where drafts of the next tokens come from, and how many of them a step verifies."""
