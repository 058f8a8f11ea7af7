// A conversation: a tree of turns. An edited message or a repeated answer is a sibling of the first one, and of siblings
// one is chosen; the chosen ones from the root on are the path that is shown and sent. Nothing here touches the page,
// the server or the browser's storage.
//
//   {id, title, created, changed, settings, count, turns: {id: turn}, chosen: {id of the parent, "" for the root: id}}
//
//   turn  {id, parent, role}    user       text, files [{name, kind: image | video | text, url | text}]
//                               assistant  text, reasoning, calls [{id, name, arguments}], model, usage, firstMs, ms, left,
//                                          end: running | stop | length | tool_calls | stopped | failed | edited, error
//                               tool       results [{id, name, text}]

const TITLE_CHARS = 60;
const ROLES = ["user", "assistant", "tool"];

export function newConversation(now, settings = {}) {
  const id = `${now.toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
  return {id, title: "", created: now, changed: now, settings: {...settings}, count: 0, turns: {}, chosen: {}};
}

export function addTurn(conversation, parent, turn) {
  const added = {...turn, id: String(++conversation.count), parent: parent?.id ?? null};
  conversation.turns[added.id] = added;
  choose(conversation, added);
  return added;
}

// A turn without turns behind it leaves, and a sibling of it is chosen.
export function removeTurn(conversation, turn) {
  const left = siblingsOf(conversation, turn).filter((one) => one !== turn);
  delete conversation.turns[turn.id];
  if (left.length) choose(conversation, left.at(-1));
  else delete conversation.chosen[turn.parent ?? ""];
}

export function choose(conversation, turn) {
  conversation.chosen[turn.parent ?? ""] = turn.id;
}

export function siblingsOf(conversation, turn) {
  return Object.values(conversation.turns).filter((one) => one.parent === turn.parent);
}

// The chosen turns, the first one first; up to `last` where it is given.
export function pathOf(conversation, last = null) {
  const path = [];
  if (last) {
    for (let turn = last; turn; turn = conversation.turns[turn.parent]) path.unshift(turn);
    return path;
  }
  for (let id = conversation.chosen[""]; id in conversation.turns; id = conversation.chosen[id]) path.push(conversation.turns[id]);
  return path;
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = pathOf(conversation)[0];
  const line = (first?.text || first?.files?.[0]?.name || "New conversation").trim().split("\n")[0];
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1)}…` : line;
}

// ---------------------------------------------------------------- what is sent

// The messages of a request. An answer of nothing is left out, and two messages of the user in a row are one: templates
// refuse other orders.
export function messagesOf(turns, system = "") {
  const messages = system ? [{role: "system", content: system}] : [];
  for (const turn of turns) {
    if (turn.role === "tool") {
      messages.push(...turn.results.map(({id, text}) => ({role: "tool", tool_call_id: id, content: text})));
    } else if (turn.role === "user") {
      const content = contentOf(turn);
      const before = messages.at(-1);
      if (before?.role === "user") before.content = joined(before.content, content);
      else messages.push({role: "user", content});
    } else if (turn.text || turn.calls?.length) {
      const calls = (turn.calls ?? []).map(({id, name, arguments: given}) => ({id, type: "function", function: {name, arguments: given}}));
      messages.push({role: "assistant", content: turn.text, ...(calls.length ? {tool_calls: calls} : {})});
    }
  }
  return messages;
}

// Text alone is a string, which every template takes. A file of text comes before the words about it.
export function contentOf({text, files = []}) {
  const written = [...files.filter(({kind}) => kind === "text").map(fileText), ...(text ? [text] : [])].join("\n\n");
  const shown = files.filter(({kind}) => kind !== "text").map(({kind, url}) => ({type: `${kind}_url`, [`${kind}_url`]: {url}}));
  if (!shown.length) return written;
  return [...shown, ...(written ? [{type: "text", text: written}] : [])];
}

function fileText({name, text}) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text}\n${fence}`;
}

function joined(first, second) {
  if (typeof first === "string" && typeof second === "string") return `${first}\n\n${second}`;
  return [first, second].flatMap((content) => (typeof content === "string" ? [{type: "text", text: content}] : content));
}

// How many turns from the first one on are left out of the prompt, as `weft chat` does it: once a conversation leaves
// less than a quarter of the context for what comes, the oldest turns go until at most half of it is taken. By halves,
// since one turn at a time would move the beginning of every later prompt, and none would be found in the prefix cache.
export function leftOut(turns, contextTokens) {
  const last = turns.findLast(({usage}) => usage);
  const already = last?.left ?? 0;
  if (!last || !contextTokens) return already;
  const used = last.usage.prompt_tokens + last.usage.completion_tokens;
  const counted = turns.slice(already, turns.indexOf(last) + 1).map(lengthOf);
  const perToken = Math.max(1, counted.reduce((sum, size) => sum + size, 0) / Math.max(1, used));
  const coming = turns.slice(turns.indexOf(last) + 1).reduce((sum, turn) => sum + lengthOf(turn), 0) / perToken;
  if (used + coming <= contextTokens * 3 / 4) return already;
  let left = already, tokens = used + coming;
  while (left < turns.length - 1 && (tokens > contextTokens / 2 || turns[left].role !== "user")) {
    tokens -= lengthOf(turns[left++]) / perToken;
  }
  return left;
}

function lengthOf({text = "", files = [], results = []}) {
  return text.length + [...files, ...results].reduce((sum, {text: own = ""}) => sum + own.length, 0);
}

// ---------------------------------------------------------------- files of conversations

// One conversation as `weft chat` saves and loads it, with the whole tree beside the path.
export function exported(conversation) {
  const path = pathOf(conversation).filter(({role}) => role !== "tool");
  const messages = [], tokens = [];
  path.forEach((turn, place) => {
    const answer = path[place + 1];
    if (turn.role !== "user" || answer?.role !== "assistant" || !answer.text) return;
    messages.push({role: "user", content: contentOf(turn)}, {role: "assistant", content: answer.text});
    tokens.push(answer.usage ? answer.usage.prompt_tokens + answer.usage.completion_tokens : 0);
  });
  const {model = "", system = "", ...sampling} = conversation.settings;
  return {weft_chat: 1, model, system: system || null, sampling, messages, tokens, conversation};
}

// The conversations of a file, rebuilt from the fields that a conversation has and nothing else. Throws an Error that
// says what is wrong.
export function imported(text, now) {
  let document_;
  try {
    document_ = JSON.parse(text);
  } catch (error) {
    throw new Error(`it is no JSON: ${error.message}`);
  }
  const saved = document_?.weft_chats ?? [document_];
  if (!Array.isArray(saved) || !saved.every((one) => one && "weft_chat" in one)) {
    throw new Error("it has no weft_chat: it is a file of neither this page nor weft chat");
  }
  return saved.map((one, place) => {
    if (one.weft_chat !== 1) throw new Error(`it is of version ${JSON.stringify(one.weft_chat)}; this page reads 1`);
    return one.conversation ? rebuilt(one.conversation, now + place) : fromMessages(one, now + place);
  });
}

const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : null);
const isShown = (kind, url) => ["image", "video"].includes(kind) && text(url).startsWith("data:");

function fromMessages({model, system, sampling, messages}, now) {
  if (!Array.isArray(messages)) throw new Error("its messages are no list");
  const made = newConversation(now, {...settingsOf(sampling), ...(text(model) ? {model} : {}), ...(text(system) ? {system} : {})});
  let last = null;
  for (const {role, content} of messages) {
    if (role !== "user" && role !== "assistant") throw new Error(`a message is of the role ${JSON.stringify(role)}`);
    const parts = typeof content === "string" ? [{type: "text", text: content}] : content;
    if (!Array.isArray(parts)) throw new Error("the content of a message is neither text nor parts");
    const said = parts.filter(({type}) => type === "text").map((one) => text(one.text)).join("\n\n");
    const files = parts.filter(({type}) => type !== "text").map((one) => {
      const kind = text(one.type).replace("_url", "");
      return {name: kind, kind, url: one[one.type]?.url};
    }).filter(({kind, url}) => isShown(kind, url));
    last = addTurn(made, last, role === "user" ? {role, text: said, files} : {role, text: said, end: "stop"});
  }
  return made;
}

function settingsOf(given) {
  return Object.fromEntries(Object.entries(given ?? {}).filter(([, value]) => ["string", "number"].includes(typeof value)));
}

function rebuilt(given, now) {
  const made = newConversation(now, settingsOf(given.settings));
  made.title = text(given.title);
  made.created = number(given.created) ?? now;
  made.changed = number(given.changed) ?? now;
  for (const [id, turn] of Object.entries(given.turns ?? {})) {
    if (!/^\d+$/.test(id) || !ROLES.includes(turn?.role)) throw new Error(`its turn ${JSON.stringify(id)} is none`);
    const parent = turn.parent === null ? null : text(turn.parent);
    if (parent !== null && !(Number(parent) < Number(id) && parent in given.turns)) throw new Error(`turn ${id} follows one that is not there`);
    made.turns[id] = {id, parent, role: turn.role, text: text(turn.text), ...ofRole(turn)};
    made.count = Math.max(made.count, Number(id));
  }
  for (const [parent, id] of Object.entries(given.chosen ?? {})) {
    if (made.turns[id] && (made.turns[id].parent ?? "") === parent) made.chosen[parent] = id;
  }
  return made;
}

function ofRole(turn) {
  const list = (value) => (Array.isArray(value) ? value : []);
  if (turn.role === "user") {
    return {files: list(turn.files).map(({name, kind, url, text: said}) => (isShown(kind, url)
      ? {name: text(name), kind, url} : {name: text(name), kind: "text", text: text(said)}))};
  }
  if (turn.role === "tool") return {results: list(turn.results).map((one) => ({id: text(one.id), name: text(one.name), text: text(one.text)}))};
  const {usage} = turn;
  return {
    reasoning: text(turn.reasoning), model: text(turn.model), error: text(turn.error), left: number(turn.left) ?? 0,
    end: turn.end === "running" ? "stopped" : text(turn.end), firstMs: number(turn.firstMs), ms: number(turn.ms),
    calls: list(turn.calls).map((one) => ({id: text(one.id), name: text(one.name), arguments: text(one.arguments)})),
    usage: usage && {prompt_tokens: number(usage.prompt_tokens) ?? 0, completion_tokens: number(usage.completion_tokens) ?? 0,
                     prompt_tokens_details: {cached_tokens: number(usage.prompt_tokens_details?.cached_tokens) ?? 0}},
  };
}
