"""An engine that runs somewhere else: its process, the messages to it, and the client that speaks to it."""
