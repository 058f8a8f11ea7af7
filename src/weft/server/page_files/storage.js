// Conversations in this browser: IndexedDB, which keeps them over reloads and restarts. `heads` has what a list shows, so
// that the list reads no picture. Where the browser refuses a database, as some private windows do, they are kept for as
// long as the tab is open.

import {titleOf} from "./conversation.js";

const NAME = "weft";
const memory = new Map();
let opened = null;

function open() {
  opened ??= new Promise((done) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", {keyPath: "id"});
      request.result.createObjectStore("heads", {keyPath: "id"});
    };
    request.onsuccess = () => {
      request.result.onversionchange = () => request.result.close();
      done(request.result);
    };
    request.onerror = () => done(null);
  }).catch(() => null);
  return opened;
}

export const isKept = async () => (await open()) !== null;

// One transaction over both stores; `act` says what it does. Resolves to the result of the request that `act` returns.
async function inBoth(mode, act) {
  const base = await open();
  return new Promise((done, failed) => {
    const step = base.transaction(["conversations", "heads"], mode);
    const request = act(step.objectStore("conversations"), step.objectStore("heads"));
    step.oncomplete = () => done(request?.result);
    step.onabort = step.onerror = () => failed(step.error ?? new Error("the browser gave no reason"));
  });
}

// {id, title, changed} of each, the one that changed last first.
export async function listHeads() {
  const heads = (await isKept()) ? await inBoth("readonly", (_, store) => store.getAll()) : [...memory.values()].map(headOf);
  return heads.sort((one, other) => other.changed - one.changed);
}

export async function readConversation(id) {
  return (await isKept()) ? inBoth("readonly", (store) => store.get(id)) : memory.get(id);
}

export async function keepConversation(conversation) {
  if (!(await isKept())) {
    memory.set(conversation.id, conversation);
    return;
  }
  await inBoth("readwrite", (store, heads) => {
    store.put(conversation);
    heads.put(headOf(conversation));
  });
  tellTabs(conversation.id);
}

export async function deleteConversations(ids) {
  ids.forEach((id) => memory.delete(id));
  if (await isKept()) {
    await inBoth("readwrite", (store, heads) => ids.forEach((id) => {
      store.delete(id);
      heads.delete(id);
    }));
  }
  ids.forEach(tellTabs);
}

const headOf = (conversation) => ({id: conversation.id, title: titleOf(conversation), changed: conversation.changed});

// ---------------------------------------------------------------- other tabs

const channel = new BroadcastChannel(NAME);
const tellTabs = (id) => channel.postMessage(id);

// Calls with the id of a conversation that another tab changed or deleted.
export function onOtherTab(changed) {
  channel.addEventListener("message", ({data}) => changed(data));
}
