"""Sessions: names for prefixes of conversations (docs/sessions.md).

    POST /v1/sessions --routes--> Generation without an answer: computes what no cache has
                             '--> Fleet.engines.pin: the state goes last, and to the store
                             '--> SessionStore: name, tokens, messages, identity
    "session" in a request --continuing--> its prompt begins with these tokens

The state itself is in the prefix tree and in the store of the engine, as that of any prefix. A session without
its state is computed again from its tokens.
"""
