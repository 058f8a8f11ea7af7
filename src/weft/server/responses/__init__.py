"""The Responses dialect (``/v1/responses``), as OpenAI's newer clients speak it; see docs/responses-api.md.

    ResponsesBody --responses_turn--> ChatTurn --prepare_turn--> PreparedTurn --ResponsesJob--> events

Nothing after ``ChatTurn`` knows which dialect the client spoke.
"""
