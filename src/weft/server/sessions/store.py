"""``SessionStore``: the sessions of a server, in the thread of its stored responses (``weft.objects.sessions``)."""

from __future__ import annotations

from weft.objects.sessions import SessionCipher, SessionLimits, SessionTable, StoredSession
from weft.server.responses.store import ResponseStore


class SessionStore:
    """The methods of ``SessionTable``, called in the thread of the file. Raises ResponseStoreError if the file
    fails."""

    def __init__(self, responses: ResponseStore, limits: SessionLimits, cipher: SessionCipher | None = None) -> None:
        self.table = SessionTable(limits, cipher)
        self._responses = responses

    async def check_room(self, name: str, owner: str, size: int) -> None:
        await self._responses.run(lambda database: self.table.check_room(database, name, owner, size))

    async def put(self, session: StoredSession, owner: str) -> None:
        await self._responses.run(lambda database: self.table.put(database, session, owner))

    async def get(self, name: str, owner: str) -> StoredSession:
        return await self._responses.run(lambda database: self.table.get(database, name, owner))

    async def listed(self, owner: str | None = None) -> list[StoredSession]:
        return await self._responses.run(lambda database: self.table.listed(database, owner))

    async def delete(self, name: str, owner: str) -> str:
        return await self._responses.run(lambda database: self.table.delete(database, name, owner))

    async def sweep(self) -> list[str]:
        return await self._responses.run(self.table.sweep)
