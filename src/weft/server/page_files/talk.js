// The turns of a conversation on the page. Each has a view that is made once and drawn again when its turn changes, so
// that an answer grows without moving a selection or a fold.

import {speedOf} from "./answer.js";
import {pathOf, siblingsOf} from "./conversation.js";
import {copyButton} from "./copying.js";
import {element, part} from "./draw.js";
import {thumbnail} from "./files.js";
import {markdownIn} from "./markdown.js";
import {counted} from "./readings.js";

const NEAR_END_PX = 60;
let actions = {};  // again, edit, goOn, choose, answerCalls: what a button of a turn does
let views = new Map();  // by the id of a turn
let shown = null;

export function startTalk(given) {
  actions = given;
  const talk = part("talk");
  talk.addEventListener("scroll", () => { part("to-end").hidden = isAtEnd(); });
  part("to-end").addEventListener("click", scrollToEnd);
}

const isAtEnd = () => {
  const talk = part("talk");
  return talk.scrollHeight - talk.scrollTop - talk.clientHeight < NEAR_END_PX;
};

export function scrollToEnd() {
  const talk = part("talk");
  talk.scrollTop = talk.scrollHeight;
}

// The whole path. A conversation that was not shown begins at its end.
export function showTalk(conversation, isBusy) {
  const wasAtEnd = isAtEnd() || shown !== conversation;
  if (shown !== conversation) views = new Map();
  shown = conversation;
  const path = pathOf(conversation);
  const made = path.map((turn) => {
    if (!views.has(turn.id)) views.set(turn.id, viewOf(turn));
    return views.get(turn.id);
  });
  const boxes = made.map(({box}) => box);
  const list = part("turns");
  if (boxes.length !== list.children.length || boxes.some((box, place) => list.children[place] !== box)) list.replaceChildren(...boxes);
  made.forEach((view, place) => view.draw(path[place], place === path.length - 1));
  list.classList.toggle("busy", isBusy);
  list.setAttribute("aria-busy", String(isBusy));
  part("welcome").hidden = path.length > 0;
  if (wasAtEnd) scrollToEnd();
}

// The turn whose piece came.
export function showTurn(turn) {
  const wasAtEnd = isAtEnd();
  views.get(turn.id)?.draw(turn, true);
  if (wasAtEnd) scrollToEnd();
}

// The turn that has the focus, or the last one of `role`.
export function turnInFocus(conversation, role) {
  const id = document.activeElement?.closest?.("article")?.dataset.turn;
  const path = pathOf(conversation);
  const focused = path.find((turn) => turn.id === id);
  if (focused && (!role || focused.role === role)) return focused;
  return path.findLast((turn) => !role || turn.role === role);
}

export function moveFocus(step) {
  const boxes = [...part("turns").children];
  const now = boxes.indexOf(document.activeElement?.closest?.("article"));
  const next = now < 0 ? boxes.at(-1) : boxes[now + step];
  if (next) next.focus();
  else if (step > 0) part("ask").focus();
}

export function pressCopy(turn) {
  views.get(turn.id)?.box.querySelector(".acts .copy")?.click();
}

// ---------------------------------------------------------------- one turn

function viewOf(turn) {
  const box = element("article", "", `turn ${turn.role}`);
  box.dataset.turn = turn.id;
  box.tabIndex = -1;
  const head = element("h3"), body = element("div"), acts = element("div", "", "acts row");
  box.append(head, body, acts);
  const drawBody = {user: userBody, assistant: answerBody, tool: toolBody}[turn.role](body);
  let isEdited = false;
  const view = {box, draw(now, isLast) {
    const name = {user: "You", assistant: now.model || "Answer", tool: "Results of tools"}[now.role];
    head.textContent = name;
    box.setAttribute("aria-label", now.role === "assistant" ? `Answer of ${name}` : name);
    if (!isEdited) drawBody(now, isLast);
    acts.hidden = isEdited;
    drawActs(acts, now, isLast, () => {
      isEdited = true;
      acts.hidden = true;
      editIn(body, now, (text) => {
        isEdited = false;
        drawBody.again?.();
        if (text === null) {
          view.draw(now, isLast);
          box.focus();
        } else actions.edit(now, text);
      });
    });
  }};
  box.edit = () => acts.querySelector(".edit")?.click();
  return view;
}

export const startEdit = (turn) => views.get(turn.id)?.box.edit();

function userBody(body) {
  return ({text, files = []}) => {
    const seen = element("div", "", "row");
    seen.append(...files.map(thumbnail));
    body.replaceChildren(...(files.length ? [seen] : []), element("p", text, "said"));
  };
}

function toolBody(body) {
  return ({results}) => body.replaceChildren(...results.flatMap(({name, text}) => [element("p", name, "quiet"), element("pre", text)]));
}

function answerBody(body) {
  let parts = null;
  const build = () => {
    const thought = element("details"), said = element("div", "", "answer"), calls = element("div", "", "calls"), note = element("p", "", "end");
    thought.append(element("summary"), element("p", "", "quiet"));
    body.replaceChildren(thought, said, calls, note);
    return {thought, said, calls, note, show: markdownIn(said), callsShown: ""};
  };
  const draw = (turn, isLast) => {
    parts ??= build();
    const {thought, said, calls, note, show} = parts;
    thought.hidden = !turn.reasoning;
    if (thought.lastChild.textContent !== turn.reasoning) thought.lastChild.textContent = turn.reasoning;
    thought.firstChild.textContent = turn.end === "running" && !turn.text ? "Thinking …" : "Reasoning";
    show(turn.text);
    said.classList.toggle("growing", turn.end === "running");
    const key = JSON.stringify([turn.calls, turn.end, isLast]);
    if (parts.callsShown !== key) drawCalls(calls, turn, isLast);
    parts.callsShown = key;
    note.textContent = endWords(turn);
    note.className = turn.end === "failed" ? "end failed" : "end";
  };
  draw.again = () => { parts = null; };
  return draw;
}

function endWords({end, error, text, reasoning, limit, usage, context}) {
  if (end === "failed") return error;
  if (end === "stopped") return text ? "Stopped here." : "Stopped before the answer began.";
  if (end === "edited") return "Edited by you.";
  if (end !== "length") return "";
  if (isAtContext({usage, context})) return "Cut here: the context is full.";
  return text || !reasoning ? `Cut here by the limit of ${limit?.toLocaleString("en") ?? "its"} tokens.`
    : `The limit of ${limit?.toLocaleString("en") ?? "its"} tokens cut its reasoning: Settings have a larger one.`;
}

const isAtContext = ({usage, context}) => Boolean(usage && context) && usage.prompt_tokens + usage.completion_tokens >= context;

function drawCalls(box, turn, isLast) {
  const isWaiting = isLast && turn.end === "tool_calls";
  const form = element("form");
  const fields = (turn.calls ?? []).map((call) => {
    const field = element("textarea");
    field.rows = 2;
    field.setAttribute("aria-label", `Result of ${call.name}`);
    field.placeholder = "what the tool returns";
    const head = element("p", "calls ", "quiet");
    head.append(element("code", call.name));
    form.append(head, element("pre", pretty(call.arguments)), ...(isWaiting ? [field] : []));
    return field;
  });
  if (isWaiting && fields.length) {
    const send = element("button", fields.length > 1 ? "Send the results" : "Send the result");
    form.append(send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      actions.answerCalls(turn, turn.calls.map(({id, name}, place) => ({id, name, text: fields[place].value})));
    });
  }
  box.replaceChildren(...(fields.length ? [form] : []));
}

function pretty(given) {
  try {
    return JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    return given;  // half of it has come
  }
}

function drawActs(acts, turn, isLast, edit) {
  const siblings = siblingsOf(shown, turn);
  const key = JSON.stringify([turn.end, siblings.map(({id}) => id), isLast, Boolean(turn.text), turn.usage?.completion_tokens, turn.ms]);
  if (acts.dataset.key === key) return;
  acts.dataset.key = key;
  const made = [];
  if (siblings.length > 1) made.push(siblingChoice(turn, siblings));
  if (turn.text && turn.end !== "running") made.push(Object.assign(copyButton(() => turn.text), {className: "copy"}));
  if (turn.end !== "running" && turn.role !== "tool") made.push(actButton("Edit", "edit", edit));
  if (turn.role === "assistant" && turn.end !== "running") made.push(actButton("Again", "again", () => actions.again(turn)));
  if (canGoOn(turn, isLast)) made.push(actButton("Go on", "go-on", () => actions.goOn(turn)));
  const said = costWords(turn);
  if (said) made.push(element("span", said, "quiet"));
  acts.replaceChildren(...made);
}

export function canGoOn(turn, isLast = true) {
  return isLast && turn?.role === "assistant" && Boolean(turn.text) && ["length", "stopped", "failed", "edited"].includes(turn.end) && !isAtContext(turn);
}

function actButton(words, kind, act) {
  const button = element("button", words, kind);
  button.type = "button";
  button.addEventListener("click", act);
  return button;
}

function siblingChoice(turn, siblings) {
  const place = siblings.indexOf(turn);
  const box = element("span", "", "siblings");
  const step = (words, label, to) => {
    const button = actButton(words, label.toLowerCase(), () => actions.choose(siblings[to]));
    button.setAttribute("aria-label", `${label} version`);
    button.disabled = !siblings[to];
    return button;
  };
  box.append(step("‹", "Previous", place - 1), element("span", `${place + 1} of ${siblings.length}`), step("›", "Next", place + 1));
  return box;
}

function costWords(turn) {
  const {usage, firstMs, left, ignored} = turn;
  if (!usage) return "";
  const speed = speedOf(turn);
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const words = [counted(usage.completion_tokens, "token"),
                 ...(firstMs === null ? [] : [`first after ${(firstMs / 1000).toFixed(2)} s`]),
                 ...(speed === null ? [] : [`${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`]),
                 `${cached.toLocaleString("en")} of ${usage.prompt_tokens.toLocaleString("en")} prompt tokens from cache`,
                 ...(left ? [`${counted(left, "turn")} left out at the beginning: the context is full`] : []),
                 ...(ignored ? [`the server left out ${ignored}`] : [])];
  return words.join(", ");
}

function editIn(body, turn, done) {
  const form = element("form"), field = element("textarea", turn.text), row = element("div", "", "row");
  const save = element("button", turn.role === "user" ? "Send" : "Keep"), cancel = element("button", "Cancel");
  field.rows = Math.min(12, turn.text.split("\n").length + 1);
  field.setAttribute("aria-label", turn.role === "user" ? "Your message" : "The answer");
  cancel.type = "button";
  row.append(save, cancel, element("span", "The first version stays: ‹ and › go between them.", "quiet"));
  form.append(field, row);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    done(field.value.trim());
  });
  cancel.addEventListener("click", () => done(null));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      done(null);
    } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      form.requestSubmit();
    }
  });
  body.replaceChildren(form);
  field.focus();
}
