"""Memory of one rank: an arena of frames that hold KV pages or recurrent states. See docs/memory.md."""
