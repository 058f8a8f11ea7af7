// Keys of the page. Each works wherever the focus is; Alt alone, so that no key of a keyboard with AltGr is taken.

import * as chat from "./chat.js";
import {element, part} from "./draw.js";
import {setDrawer, step} from "./shelf.js";
import {moveFocus, pressCopy, startEdit, turnInFocus} from "./talk.js";
import {siblingsOf} from "./conversation.js";

const answer = () => turnInFocus(chat.conversation(), "assistant");
const sibling = (by) => {
  const turn = turnInFocus(chat.conversation());
  const all = turn ? siblingsOf(chat.conversation(), turn) : [];
  const next = all[all.indexOf(turn) + by];
  if (next) chat.choose(next);
};

const KEYS = [  // [code, shown, words, act]
  ["KeyN", "Alt N", "new conversation", chat.create],
  ["PageUp", "Alt Page Up", "the conversation above in the list", () => step(-1)],
  ["PageDown", "Alt Page Down", "the one below", () => step(1)],
  ["KeyL", "Alt L", "the list of conversations", () => {
    setDrawer(true);
    (document.querySelector("#conversations [aria-current]") ?? part("new")).focus();
  }],
  ["ArrowUp", "Alt ↑", "the turn above", () => moveFocus(-1)],
  ["ArrowDown", "Alt ↓", "the turn below", () => moveFocus(1)],
  ["Comma", "Alt ,", "the version before of this turn", () => sibling(-1)],
  ["Period", "Alt .", "the next version", () => sibling(1)],
  ["KeyE", "Alt E", "edit this message, or the last one", () => {
    const turn = turnInFocus(chat.conversation(), "user");
    if (turn) startEdit(document.activeElement?.closest?.("article.assistant") ? answer() : turn);
  }],
  ["KeyR", "Alt R", "ask for this answer again, or the last one", () => answer() && chat.again(answer())],
  ["KeyG", "Alt G", "go on with the answer", () => answer() && chat.goOn(answer())],
  ["KeyC", "Alt C", "copy this answer, or the last one", () => answer() && pressCopy(answer())],
  ["KeyM", "Alt M", "the model", () => part("model-name").focus()],
  ["KeyS", "Alt S", "settings of the conversation", () => {
    part("settings").open = !part("settings").open;
    if (part("settings").open) part("system").focus();
  }],
  ["KeyA", "Alt A", "attach files", () => part("attach").click()],
  ["KeyV", "Alt V", "between chat and server", () => { location.hash = location.hash === "#server" ? "#chat" : "#server"; }],
];
const OTHERS = [["Enter", "send"], ["Shift Enter", "a new line"], ["Escape", "stop the answer"], ["/", "into the message field"], ["?", "this list"]];

export function startKeys() {
  part("keys-list").replaceChildren(...[...OTHERS, ...KEYS.map(([, shown, words]) => [shown, words])].map(([shown, words]) => {
    const row = element("tr");
    row.append(element("td"), element("td", words));
    row.firstChild.append(element("kbd", shown));
    return row;
  }));
  part("keys-open").addEventListener("click", () => part("keys").showModal());
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
    if (event.key === "Escape" && !event.isComposing) chat.stop();
    if (!isTyping && !event.altKey && !event.ctrlKey && !event.metaKey && ["/", "?"].includes(event.key)) {
      event.preventDefault();
      if (event.key === "/") part("ask").focus();
      else part("keys").showModal();
    }
    if (!event.altKey || event.ctrlKey || event.metaKey) return;
    const found = KEYS.find(([code]) => code === event.code);
    if (!found) return;
    event.preventDefault();
    found[3]();
  });
}
