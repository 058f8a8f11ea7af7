// Who asks the server, and with which key. A key stays in this tab.

const KEY = "weft-key";

export class KeyWantedError extends Error {}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

// What /health says; it needs no key, and answers 503 where it says that something is wrong.
export async function readHealth() {
  return (await fetch("health", {cache: "no-store"})).json();
}

// Throws KeyWantedError where the server wants a key or another one, Error with the server's own words otherwise.
export async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = {...options.headers, ...(key ? {Authorization: `Bearer ${key}`} : {})};
  const answer = await fetch(path, {...options, headers, cache: "no-store"});
  if (answer.ok) return answer;
  if (answer.status === 401) {
    if (sessionStorage.getItem(KEY) !== key) return ask(path, options);  // another one was put in meanwhile
    throw new KeyWantedError(key ? "That is no key of this server: put another one into the box."
      : "This server wants a key: put it into the box.");
  }
  const words = await answer.json().then((body) => body.error?.message ?? "", () => "") || `HTTP ${answer.status}`;
  throw new Error(words);
}

// The data of each server-sent event, parsed, until [DONE].
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}
