"""Opens as many WebSockets as its argument orders, some at a time, has a session on
each, and prints what came of each as one line of JSON."""

import asyncio
import json
import ssl
import sys
import time

from websockets.asyncio.client import connect

order = json.loads(sys.argv[1])
places = asyncio.Semaphore(order["parallel"])
trusted = ssl.create_default_context()


async def session():
    async with places:
        began, got = time.monotonic(), {"backend": "", "seconds": 0.0, "text": "", "error": ""}
        try:
            async with connect(
                order["url"].replace("https", "wss", 1), ssl=trusted, proxy=None, open_timeout=20,
                additional_headers={"Authorization": "Bearer client-key"}, subprotocols=["realtime"],
            ) as socket:
                got["seconds"] = time.monotonic() - began
                got["backend"] = socket.response.headers["x-simulator"]
                await socket.send(json.dumps({"type": "response.create"}))
                async for message in socket:
                    event = json.loads(message)
                    if event["type"] == "response.output_text.done":
                        got["text"] = event["text"]
                    if event["type"] == "response.done":
                        break
        except Exception as error:
            got["error"] = repr(error)
        return got


async def main():
    print(json.dumps(await asyncio.gather(*(session() for _ in range(order["count"])))))


asyncio.run(main())
