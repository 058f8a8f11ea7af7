"""The Messages dialect (``/v1/messages``), as Anthropic's clients speak it; see docs/messages.md.

    MessagesBody --turns.chat_body--> ChatBody --prepare_chat--> ChatJob --answers.MessagesJob--> events

A dialect lives at the edge: nothing behind ``ChatBody`` knows which one the client spoke.
"""
