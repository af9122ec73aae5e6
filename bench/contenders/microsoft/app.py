"""Microsoft's openai-priority-loadbalancer as a proxy.

It is made to be the transport of an httpx client, which is all this does: every
request goes through one such client, with the connections and the timeouts that
the library itself does not set. It reads a reply whole before it hands it on.
"""

import os

import httpx
from openai_priority_loadbalancer import AsyncLoadBalancer, Backend

backends = [
    Backend(host, int(priority), None, os.environ["BACKEND_KEY"])
    for host, priority in (b.split("=") for b in os.environ["BACKENDS"].split())
]
balancer = AsyncLoadBalancer(backends)
# Its own client has 100 connections at most, and forgets them after 5 s.
balancer._transport = httpx.AsyncClient(limits=httpx.Limits(max_connections=None, max_keepalive_connections=200))
client = httpx.AsyncClient(transport=balancer, timeout=float(os.environ["TIMEOUT"]))
origin = "http://backend:" + os.environ["BACKEND_PORT"]
not_ours = {b"host", b"content-length", b"connection", b"authorization"}
not_theirs = {b"content-length", b"content-encoding", b"transfer-encoding", b"connection"}


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    headers = [h for h in scope["headers"] if h[0] not in not_ours]
    try:
        response = await client.request(scope["method"], origin + scope["path"], headers=headers, content=body)
        status, content = response.status_code, response.content
        headers = [h for h in response.headers.raw if h[0].lower() not in not_theirs]
    except httpx.TimeoutException:
        status, content, headers = 504, b"", []
    except (httpx.HTTPError, ValueError):  # ValueError: it cannot read the Retry-After
        status, content, headers = 502, b"", []
    headers.append((b"content-length", str(len(content)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
