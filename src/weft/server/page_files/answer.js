// One answer: a request, and its stream into a turn of the conversation.

import {ask, events} from "./server.js";

// Fills `turn`, whose text may have begun before. `onChange` is called with each piece. Resolves when the answer has
// ended; an answer that fails, or that `signal` stops, keeps what came. Throws what the server refuses.
export async function streamInto(turn, body, signal, onChange) {
  const begun = performance.now();
  Object.assign(turn, {end: "running", error: "", usage: null, firstMs: null, ms: 0});
  try {
    const answer = await ask("v1/chat/completions", {
      method: "POST", signal, headers: {"Content-Type": "application/json"},
      body: JSON.stringify({...body, stream: true, stream_options: {include_usage: true, continuous_usage_stats: true}}),
    });
    turn.ignored = answer.headers.get("X-Weft-Ignored") ?? "";
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      turn.model = event.model ?? turn.model;
      const choice = event.choices?.[0];
      if (choice) {
        takeDelta(turn, choice.delta ?? {});
        if (choice.finish_reason) turn.end = choice.finish_reason;
      }
      turn.usage = event.usage ?? turn.usage;
      turn.ms = performance.now() - begun;
      if (choice?.delta?.content || choice?.delta?.reasoning || choice?.delta?.tool_calls) turn.firstMs ??= turn.ms;
      onChange();
    }
    if (turn.end === "running") throw new Error("the connection ended before the answer did");
  } catch (error) {
    turn.ms = performance.now() - begun;
    turn.end = error.name === "AbortError" ? "stopped" : "failed";
    if (turn.end === "failed") {
      turn.error = error.message;
      throw error;
    }
  }
}

function takeDelta(turn, delta) {
  turn.reasoning += delta.reasoning ?? "";
  turn.text += delta.content ?? "";
  for (const {index, id, function: called} of delta.tool_calls ?? []) {
    const call = turn.calls[index] ??= {id: "", name: "", arguments: ""};
    call.id ||= id ?? "";
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
}

// Tokens a second between the first and the last one; null where too few came to say.
export function speedOf({usage, firstMs, ms}) {
  const seconds = (ms - (firstMs ?? ms)) / 1000;
  return usage && seconds > 0.1 ? (usage.completion_tokens - 1) / seconds : null;
}
