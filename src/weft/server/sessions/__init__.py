"""Sessions: names for prefixes of conversations (docs/sessions.md).

    POST /v1/sessions --routes--> Generation without an answer: computes what no cache has
                             '--> Fleet.engines.pin: the state is evicted last, and written to the store
                             '--> SessionStore: name, tokens, messages, identity
    "session" in a request --continuing--> its prompt begins with these tokens

The state itself is in the prefix tree and in the store of the engine, like the state of any prefix. If it was evicted,
it is computed again from the tokens of the session.
"""
