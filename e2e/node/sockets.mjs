// Opens as many WebSockets as its argument orders, some at a time, has a session on
// each, and prints what came of each as one line of JSON.
import { WebSocket } from "ws";

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

function open(got, opened) {
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

async function session() {
  const got = { backend: "", seconds: 0, text: "", error: "" };
  const began = performance.now();
  const opened = () => (got.seconds = (performance.now() - began) / 1000);
  try {
    await open(got, opened);
  } catch (error) {
    got.error = String(error);
  }
  return got;
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
console.log(JSON.stringify(outcomes));
