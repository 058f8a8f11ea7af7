// The chat: which conversation is open, which answers run, and what the keys and buttons do to both.
//
//   message --> turn of the user --+--> request of the path --> turn of the answer, which grows --> kept in the browser
//   again, edit: a sibling         '--  go on: the same turn grows further
//
// A law: a message that got no answer at all leaves the conversation as it was, and goes back into the field.

import {streamInto} from "./answer.js";
import * as tree from "./conversation.js";
import {part} from "./draw.js";
import {setFiles, startFiles, waitingFiles} from "./files.js";
import {chosenModel, listModels} from "./models.js";
import {readSettings, requestFields, showDefaults, showSettings, startSettings} from "./settings.js";
import {startShelf} from "./shelf.js";
import * as storage from "./storage.js";
import {canGoOn, scrollToEnd, showTalk, showTurn, startTalk} from "./talk.js";

const DRAW_MS = 40;
const KEEP_MS = 2000;
const OPEN = "weft-open";
const SPOKEN_CHARS = 2000;
let open = tree.newConversation(Date.now());
let shelf = null;
let onKeyWanted = () => {};
const running = new Map();  // by the id of a conversation: {conversation, stopper}
const deleted = new Set();  // ids: an answer that is stopped by it ends later, and must not bring its conversation back

export const conversation = () => open;

export async function startChat(given) {
  onKeyWanted = given;
  startFiles(say);
  startTalk({again, edit, goOn, answerCalls, choose});
  startSettings((settings) => {
    open.settings = settings;
    if (open.count) keep(open);
  });
  shelf = startShelf({open: show, create, forget, changed: keep, say, now: () => open});
  part("ask-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  part("ask").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  part("stop").addEventListener("click", stop);
  part("settings").addEventListener("toggle", () => refreshModels());
  storage.onOtherTab(async (id) => {
    if (id === open.id && !running.has(id)) {
      const kept = await storage.readConversation(id);
      if (kept) show(kept);
    }
    shelf.refresh();
  });
  addEventListener("pagehide", () => running.forEach(({conversation: one}) => keep(one)));
  await refreshModels();
  const begun = open;
  const kept = await storage.readConversation(sessionStorage.getItem(OPEN) ?? "").catch(() => null);
  if (kept && open === begun && !open.count) show(kept);
  else draw();
  if (!(await storage.isKept())) say("This browser keeps nothing here: conversations end with this tab.");
  await shelf.refresh();
}

export async function refreshModels() {
  try {
    await listModels();
    showDefaults();
  } catch (error) {
    onKeyWanted(error);
  }
}

export function say(words) {
  part("notice").textContent = words;
  part("notice").hidden = !words;
}

function draw() {
  const isBusy = running.has(open.id);
  showTalk(open, isBusy);
  part("send").hidden = isBusy;
  part("stop").hidden = !isBusy;
  const title = tree.titleOf(open);
  part("title").textContent = open.count ? title : "";
  document.title = open.count ? `${title} · weft` : "weft";
}

async function keep(changed) {
  if (!tree.pathOf(changed).length || deleted.has(changed.id)) return;
  changed.changed = Date.now();
  try {
    await storage.keepConversation(changed);
  } catch (error) {
    say(`This browser did not keep the conversation: ${error.message}`);
  }
  await shelf.refresh();
}

// ---------------------------------------------------------------- which one is open

export function show(other) {
  open = running.get(other.id)?.conversation ?? other;
  for (const turn of Object.values(open.turns)) {
    if (turn.end === "running" && !running.has(open.id)) turn.end = "stopped";  // its tab was closed
  }
  sessionStorage.setItem(OPEN, open.id);
  say("");
  showSettings(open.settings);
  draw();
  shelf.refresh();
}

// A new one has the settings of the last one.
export function create() {
  show(tree.newConversation(Date.now(), readSettings()));
  setFiles([]);
  part("ask").focus();
}

// Of conversations that were deleted.
function forget(ids) {
  ids.forEach((id) => {
    deleted.add(id);
    running.get(id)?.stopper.abort();
  });
  if (ids.includes(open.id)) create();
}

// ---------------------------------------------------------------- turns

export function send() {
  const field = part("ask"), text = field.value.trim(), files = waitingFiles();
  if ((!text && !files.length) || running.has(open.id)) return;
  const talk = open, last = tree.pathOf(talk).at(-1);
  field.value = "";
  setFiles([]);
  scrollToEnd();
  answer(talk, tree.addTurn(talk, last, {role: "user", text, files})).then((came) => {
    if (came || talk !== open) return;
    field.value ||= text;
    if (!waitingFiles().length) setFiles(files);
  });
}

export const stop = () => running.get(open.id)?.stopper.abort();

export function again(turn) {
  if (!running.has(open.id)) answer(open, open.turns[turn.parent], false);
}

// A message that is edited is asked, an answer is kept.
export function edit(turn, text) {
  const parent = open.turns[turn.parent];
  if (turn.role === "user") {
    answer(open, tree.addTurn(open, parent, {role: "user", text, files: turn.files}));
    return;
  }
  tree.addTurn(open, parent, {...turn, text, end: "edited", usage: null, error: ""});
  draw();
  keep(open);
}

export function goOn(turn) {
  if (running.has(open.id) || !canGoOn(turn)) return;
  run(open, turn, {add_generation_prompt: false, continue_final_message: true});
}

function answerCalls(turn, results) {
  if (!running.has(open.id)) answer(open, tree.addTurn(open, turn, {role: "tool", text: "", results}));
}

export function choose(turn) {
  if (running.has(open.id)) return;
  tree.choose(open, turn);
  draw();
  keep(open);
}

// The answer to `question`, which is new or had one before. Resolves to whether anything came; if not, the turn is gone,
// and a new question with it.
async function answer(talk, question, isNew = true) {
  const turn = tree.addTurn(talk, question, {role: "assistant", text: "", reasoning: "", calls: [], model: part("model-name").value,
                                             usage: null, firstMs: null, ms: 0, end: "running", error: "", left: 0});
  const came = await run(talk, turn, {});
  if (!came) tree.removeTurn(talk, turn);
  if (!came && isNew) tree.removeTurn(talk, question);
  if (talk === open) draw();
  keep(talk);
  return came;
}

// `turn` grows until its answer ends, fails or is stopped. Resolves to whether the turn is worth keeping.
async function run(talk, turn, more) {
  const stopper = new AbortController();
  if (talk === open) talk.settings = readSettings();
  running.set(talk.id, {conversation: talk, stopper});
  say("");
  part("spoken").textContent = "";
  draw();
  let drawing = 0, keptAt = performance.now();
  const grown = () => {
    drawing ||= setTimeout(() => {
      drawing = 0;
      if (talk === open) showTurn(turn);
      if (performance.now() - keptAt > KEEP_MS) {
        keptAt = performance.now();
        keep(talk);
      }
    }, DRAW_MS);
  };
  try {
    const fields = requestFields(talk.settings), card = chosenModel();
    Object.assign(turn, {limit: fields.max_tokens, context: card?.max_model_len ?? 0});
    if (["absent", "failed", "loading"].includes(card?.state)) say(`${card.id} is loaded first …`);
    const path = tree.pathOf(talk, turn).filter((one) => one !== turn || more.continue_final_message);
    turn.left = tree.leftOut(path, turn.context);
    const messages = tree.messagesOf(path.slice(turn.left), talk.settings.system);
    await streamInto(turn, {...fields, ...more, messages}, stopper.signal, () => {
      if (!drawing) say("");
      grown();
    });
  } catch (error) {
    turn.end = "failed";
    turn.error = error.message;
    onKeyWanted(error);
    if (talk === open && !turn.text) say(error.message);
  } finally {
    clearTimeout(drawing);
    running.delete(talk.id);
  }
  const came = turn.end !== "failed" || Boolean(turn.text || turn.reasoning || turn.calls.length);
  if (talk === open) part("spoken").textContent = came ? `Answer: ${turn.text.slice(0, SPOKEN_CHARS)}` : "";
  if (more.continue_final_message) {
    draw();
    keep(talk);
  }
  return came;
}
