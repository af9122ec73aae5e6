"""Has chains of responses over WebSockets, as many as its argument orders, and prints what came of each as one line of JSON: two on one
WebSocket, and one on another, each going on from the one before."""

import asyncio
import json
import sys

from openai import AsyncOpenAI

order = json.loads(sys.argv[1])
client = AsyncOpenAI(base_url=order["url"], api_key="client-key")
places = asyncio.Semaphore(order["parallel"])


async def respond(connection, **previous):
    await connection.response.create(model="gpt-5", input="hello", **previous)
    async for event in connection:
        if event.type == "error":
            raise RuntimeError(event.to_json())
        if event.type in ("response.completed", "response.incomplete"):
            return event.response.id


async def chain():
    async with places:
        try:
            async with client.responses.connect() as connection:
                first = await respond(connection)
                second = await respond(connection, previous_response_id=first)
            async with client.responses.connect() as connection:
                return {"id": await respond(connection, previous_response_id=second)}
        except Exception as error:
            return {"error": repr(error)}


async def main():
    print(json.dumps(await asyncio.gather(*(chain() for _ in range(order["count"])))))


asyncio.run(main())
