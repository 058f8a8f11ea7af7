"""The endpoints of Responses.

    POST /v1/responses                  an answer, whole or as a stream
    POST /v1/responses/input_tokens     the length of a prompt
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from weft.server.exchange import Handler, answer_job, json_response, namespace_of, read_raw
from weft.server.protocol import read_body
from weft.server.responses.answers import ResponsesJob
from weft.server.responses.items import read_items
from weft.server.responses.protocol import UNSERVED_IN_RESPONSES, ResponsesBody, check_fields
from weft.server.responses.turns import conversation, responses_turn
from weft.server.service import Service
from weft.server.turn import prepare_turn


def response_handlers(service: Service) -> dict[str, Handler]:
    """By operation of ``weft.server.openapi.endpoints``."""
    handlers = ResponseHandlers(service)
    return {"create_response": handlers.create, "response_input_tokens": handlers.input_tokens}


class ResponseHandlers:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        self._service.check_open()
        body = await self._body(request)
        turn = responses_turn(body, read_items(body.input))
        job = ResponsesJob(await prepare_turn(self._service, turn), body)
        return await answer_job(request, job, stream=bool(body.stream),
                                keep_alive_s=self._service.config.sse_keep_alive)

    async def input_tokens(self, request: Request) -> Response:
        self._service.check_open()
        body = await self._body(request)
        model = self._service.model_for(body.model)
        _, prompt = await model.write_chat(conversation(body, read_items(body.input)), with_places=False)
        await model.check_text(prompt.text, param="input")
        count = len(await model.encode(prompt.text, add_special_tokens=False))
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def _body(self, request: Request) -> ResponsesBody:
        body = await read_body(await read_raw(request), ResponsesBody, unserved=UNSERVED_IN_RESPONSES)
        check_fields(body)
        body.cache_salt = namespace_of(request, body.cache_salt)
        return body
