// Opens as many WebSockets as its argument orders, some at a time, has a session on
// each, and prints what came of each as one line of JSON. Over HTTP/2, a WebSocket is a
// stream of one connection (RFC 8441).
import http2 from "node:http2";
import { once } from "node:events";
import { Receiver, Sender, WebSocket } from "ws";

const order = JSON.parse(process.argv[2]);
const url = new URL(order.url);
const headers = { authorization: "Bearer client-key" };
const ask = JSON.stringify({ type: "response.create" });

// converse takes the messages of a session, and reports whether it is over.
function converse(got, message) {
  const event = JSON.parse(message);
  if (event.type === "response.output_text.done") got.text = event.text;
  return event.type === "response.done";
}

function overHTTP1(got, opened) {
  return new Promise((resolve, reject) => {
    const socket = new WebSocket(url.href.replace("https", "wss"), ["realtime"], { headers, handshakeTimeout: 20_000 });
    socket.on("upgrade", (response) => (got.backend = response.headers["x-simulator"]));
    socket.on("open", () => {
      opened();
      socket.send(ask);
    });
    socket.on("message", (message) => {
      if (converse(got, message)) socket.close(1000);
    });
    socket.on("error", reject);
    socket.on("close", (code) => (code === 1000 ? resolve() : reject(new Error(`closed with code ${code}`))));
  });
}

let connection;

function overHTTP2(got, opened) {
  return new Promise((resolve, reject) => {
    const stream = connection.request(
      { ...headers, ":method": "CONNECT", ":protocol": "websocket", ":scheme": "https", ":authority": url.host, ":path": url.pathname + url.search,
        "sec-websocket-version": "13", "sec-websocket-protocol": "realtime" },
      { endStream: false },
    );
    const receiver = new Receiver({ isServer: false });
    const sender = new Sender(stream);
    stream.setTimeout(20_000, () => stream.destroy(new Error("timeout")));
    stream.on("response", (response) => {
      got.backend = response["x-simulator"] ?? "";
      if (response[":status"] !== 200) return stream.destroy(new Error(`status ${response[":status"]}`));
      opened();
      sender.send(ask, { binary: false, compress: false, fin: true, mask: true });
      stream.pipe(receiver);
    });
    receiver.on("message", (message) => {
      if (converse(got, message)) sender.close(1000, undefined, true);
    });
    receiver.on("conclude", (code) => {
      stream.end();
      if (code === 1000) resolve();
      else reject(new Error(`closed with code ${code}`));
    });
    receiver.on("error", reject);
    stream.on("error", reject);
    stream.on("close", () => reject(new Error("closed without a close frame")));
  });
}

async function session() {
  const got = { backend: "", seconds: 0, text: "", error: "" };
  const began = performance.now();
  const opened = () => (got.seconds = (performance.now() - began) / 1000);
  try {
    await (order.http2 ? overHTTP2 : overHTTP1)(got, opened);
  } catch (error) {
    got.error = String(error);
  }
  return got;
}

if (order.http2) {
  connection = http2.connect(url.origin);
  await once(connection, "remoteSettings");
  if (!connection.remoteSettings.enableConnectProtocol) throw new Error("the server offers no extended CONNECT");
}
const outcomes = [];
await Promise.all(
  Array.from({ length: order.parallel }, async () => {
    while (outcomes.length < order.count) {
      const place = outcomes.push(null) - 1;
      outcomes[place] = await session();
    }
  }),
);
connection?.close();
console.log(JSON.stringify(outcomes));
