// The list of kept conversations: open, rename, delete, export and import. A click or Enter opens; F2 renames and Delete
// deletes the one that has the focus.

import {exported, imported, titleOf} from "./conversation.js";
import {element, part} from "./draw.js";
import {deleteConversations, keepConversation, listHeads, readConversation} from "./storage.js";

let actions = {};  // open, create, forget, changed, say, now
let heads = [];

export function startShelf(given) {
  actions = given;
  part("new").addEventListener("click", () => {
    closeDrawer();
    actions.create();
  });
  part("find").addEventListener("input", draw);
  part("export-all").addEventListener("click", exportAll);
  part("import").addEventListener("click", () => part("import-file").click());
  part("import-file").addEventListener("change", importFile);
  part("delete-all").addEventListener("click", async () => {
    if (await isSure(`Delete all ${heads.length} conversations of this browser?`)) remove(heads.map(({id}) => id));
  });
  part("list-open").addEventListener("click", () => setDrawer(part("list-open").getAttribute("aria-expanded") !== "true"));
  part("conversation").addEventListener("click", closeDrawer);
  part("list").addEventListener("keydown", (event) => {
    const id = event.target.closest("li")?.dataset.id;
    if (event.key === "Escape") closeDrawer();
    if (!id || event.target.tagName === "INPUT") return;
    if (event.key === "F2") rename(id);
    if (event.key === "Delete") removeOne(id);
  });
  return {refresh, step};
}

// Marks the open conversation at once, then reads the list anew.
export async function refresh() {
  draw();
  heads = await listHeads();
  draw();
}

// On a phone the list lies over the chat.
export function setDrawer(isOpen) {
  document.body.classList.toggle("list-open", isOpen);
  part("list-open").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) part("new").focus();
}

const closeDrawer = () => setDrawer(false);

function draw() {
  if (part("conversations").querySelector("input")) return;  // a title is being written
  const sought = part("find").value.toLowerCase();
  const now = actions.now();
  const focused = document.activeElement?.closest?.("li")?.dataset.id;
  part("conversations").replaceChildren(...heads.filter(({title}) => title.toLowerCase().includes(sought)).map((head) => {
    const row = element("li");
    row.dataset.id = head.id;
    const button = element("button", head.title, "open");
    button.title = `${head.title}\n${new Date(head.changed).toLocaleString()}`;
    button.addEventListener("click", () => openOne(head.id));
    row.append(button);
    if (head.id === now.id) {
      button.setAttribute("aria-current", "true");
      row.append(small("✎", "Rename (F2)", () => rename(head.id)), small("⤓", "Export", () => exportOne(head.id)),
                 small("×", "Delete (Delete)", () => removeOne(head.id)));
    }
    return row;
  }));
  part("shelf-all").hidden = !heads.length;
  part("find").hidden = heads.length < 8;
  if (focused) rowOf(focused)?.querySelector(".open").focus();
}

const rowOf = (id) => [...part("conversations").children].find((row) => row.dataset.id === id);

function small(words, label, act) {
  const button = element("button", words, "small");
  button.title = label;
  button.setAttribute("aria-label", label.replace(/ \(.*/, ""));
  button.addEventListener("click", act);
  return button;
}

async function openOne(id) {
  const kept = await readConversation(id);
  closeDrawer();
  if (kept) actions.open(kept);
}

// The next conversation of the list, or the one before.
export function step(by) {
  const place = heads.findIndex(({id}) => id === actions.now().id);
  const next = place < 0 ? heads[0] : heads[place + by];
  if (next) openOne(next.id);
}

// The one in the chat may be newer than the one in the database.
const current = async (id) => (actions.now().id === id ? actions.now() : readConversation(id));

async function rename(id) {
  const row = rowOf(id), talk = await current(id);
  const field = element("input");
  field.value = titleOf(talk);
  field.setAttribute("aria-label", "Title of the conversation");
  let isDone = false;
  const end = (title) => {
    if (isDone) return;
    isDone = true;
    field.remove();
    if (title !== null) talk.title = title.trim();
    if (title !== null) actions.changed(talk).then(() => { if (talk === actions.now()) actions.open(talk); });
    else draw();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") end(field.value);
    if (event.key === "Escape") end(null);
    event.stopPropagation();
  });
  field.addEventListener("blur", () => end(field.value));
  row.replaceChildren(field);
  field.select();
}

async function removeOne(id) {
  const talk = await current(id);
  if (await isSure(`Delete “${titleOf(talk)}”?`)) remove([id]);
}

async function remove(ids) {
  actions.forget(ids);
  await deleteConversations(ids);
  await refresh();
}

let settle = null;

// The dialog of the page rather than the browser's, which would stop every answer that runs.
function isSure(words) {
  const dialog = part("sure");
  settle?.(dialog.returnValue === "yes"); // the event of an earlier answer may come only when the dialog is open again
  part("sure-words").textContent = words;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => {
    settle = done;
    dialog.onclose = () => {
      if (!dialog.open) done(dialog.returnValue === "yes");
    };
  });
}

// ---------------------------------------------------------------- files

async function exportOne(id) {
  const talk = await current(id);
  download(exported(talk), titleOf(talk).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation");
}

async function exportAll() {
  const all = await Promise.all(heads.map(({id}) => current(id)));
  download({weft_chats: all.map(exported)}, "weft-conversations");
}

function download(content, name) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(content, null, 1)], {type: "application/json"}));
  link.download = `${name}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

async function importFile() {
  const [file] = part("import-file").files;
  part("import-file").value = "";
  try {
    const read = imported(await file.text(), Date.now());
    for (const talk of read) await keepConversation(talk);
    await refresh();
    if (read.length) actions.open(read[0]);
    actions.say(`${read.length === 1 ? "1 conversation" : `${read.length} conversations`} of ${file.name}`);
  } catch (error) {
    actions.say(`${file.name} was not imported: ${error.message}`);
  }
}
