// Has chains of responses over WebSockets, as many as its argument orders, and prints what came of each as one line of JSON: two on one
// WebSocket, and one on another, each going on from the one before.
import OpenAI from "openai";
import { ResponsesWS } from "openai/resources/responses/ws";

const order = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: order.url, apiKey: "client-key" });

function respond(socket, previous) {
  return new Promise((resolve, reject) => {
    socket.on("event", (event) => {
      if (event.type === "response.completed" || event.type === "response.incomplete") resolve(event.response.id);
    });
    socket.on("error", reject);
    socket.send({ type: "response.create", model: "gpt-5", input: "hello", ...previous });
  });
}

async function chain() {
  try {
    const one = new ResponsesWS(client);
    const first = await respond(one);
    const second = await respond(one, { previous_response_id: first });
    one.close();
    const two = new ResponsesWS(client);
    const id = await respond(two, { previous_response_id: second });
    two.close();
    return { id };
  } catch (error) {
    return { error: String(error) };
  }
}

const outcomes = [];
await Promise.all(
  Array.from({ length: order.parallel }, async () => {
    while (outcomes.length < order.count) {
      const place = outcomes.push(null) - 1;
      outcomes[place] = await chain();
    }
  }),
);
console.log(JSON.stringify(outcomes));
