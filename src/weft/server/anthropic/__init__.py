"""The Messages dialect (``/v1/messages``), as Anthropic's clients speak it; see docs/messages-api.md.

    MessagesBody --messages_turn--> ChatTurn --prepare_turn--> PreparedTurn --MessagesJob--> events

Nothing after ``ChatTurn`` knows which dialect the client spoke.
"""
