"""A request that continues a session: ``session`` in its body names it.

    session of a conversation + messages      the conversation goes on; its tokens stand for its text (KnownPrefix)
    session of tokens         + prompt        the prompt follows the tokens

The session itself does not change, so a hundred requests may continue the same session. Requests get its
``cache_salt``: under another salt the state would not be found.
"""

from __future__ import annotations

from weft.objects.sessions import StoredSession, UnknownSessionError, check_identity, identity_facts
from weft.server.protocol import SamplingFields
from weft.server.served_model import ServedModel
from weft.server.service import Service
from weft.server.sessions.store import SessionStore
from weft.text.current_request import API_KEY


def session_store(service: Service) -> SessionStore:
    """Return the store of sessions. Raise UnknownSessionError if this server keeps no sessions."""
    if service.sessions is None:
        raise UnknownSessionError(
            "this server keeps no sessions (server.response_store off)", param="session", code="sessions_off"
        )
    return service.sessions


def identity_of(service: Service, model: ServedModel) -> dict[str, str]:
    """Return the facts that must be equal for tokens and states of ``model`` to mean the same."""
    fleet = service.models.find(model.base).fleet
    weights = "" if fleet is None else fleet.weights_digest
    return identity_facts(model.info.identity, weights, "" if model.adapter is None else model.adapter.digest)


async def session_of(service: Service, fields: SamplingFields, name: str, model: ServedModel) -> StoredSession:
    """Return the session that a request continues, and give the request the session's salt. Raise UnknownSessionError,
    SessionConflictError."""
    session = await session_store(service).get(name, API_KEY.get())
    check_identity(session, model.base, identity_of(service, model))
    fields.cache_salt = session.salt
    service.metrics.count(model.base, "session_hits")
    return session
