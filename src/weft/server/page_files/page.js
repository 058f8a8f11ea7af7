// The page: looks at the server once a second while it is visible. Both views are drawn from what it finds.

import {refreshModels, startChat} from "./chat.js";
import {part} from "./draw.js";
import {faultsOf} from "./faults.js";
import {startKeys} from "./keys.js";
import {allModels} from "./models.js";
import {drawFaults, drawNumbers, drawServer, EVERY_MS, keepReading} from "./monitor.js";
import * as readings from "./readings.js";
import {ask, hasKey, keepKey, KeyWantedError, readHealth} from "./server.js";
import {isServerShown, startViews} from "./views.js";

const ADDRESS = new URL(".", location.href).href;
let listedFor = "";  // the states of the models for which the list was read

function setState(words, kind) {
  part("state").textContent = words;
  part("state").className = `pill ${kind}`;
}

function wantKey(error) {
  if (!(error instanceof KeyWantedError)) return;
  part("key-why").textContent = error.message;
  part("key-form").hidden = false;
  setState("wants a key", "down");
}

async function look() {
  if (document.hidden || !part("key-form").hidden) return;
  try {
    const health = await readHealth();
    const now = readings.parse(await (await ask("metrics")).text(), performance.now() / 1000);
    part("version").textContent ||= (await (await ask("version")).json()).version;
    part("model").textContent = now.model;
    await listAnew(now, health);
    const replicas = await readReplicas(now, health);
    const faults = faultsOf({health, replicas, cards: allModels(), now, first: keepReading(now), url: ADDRESS, hasKey: hasKey()});
    const words = readings.sleepState(now);
    setState(faults.length ? `${words}: ${readings.counted(faults.length, "fault")}` : words, faults.length ? "down" : "up");
    drawFaults(faults);
    drawNumbers(now);
    if (isServerShown()) await drawServer(now, replicas, allModels());
  } catch (error) {
    setState(`no answer: ${error.message}`, "down");
    drawFaults([{what: "The server does not answer.", why: error.message, mend: "On its machine, this lists the servers that run:", command: "weft ps"}]);
    wantKey(error);
  }
}

// Reads /v1/models where a model came, went or failed, and not with every look: each is a line in the access log.
async function listAnew(now, health) {
  const states = JSON.stringify([health.status, health.models, Object.values(now.models).map((values) => values.model_loads_total)]);
  if (states === listedFor && allModels().length) return;
  await refreshModels();
  listedFor = states;
}

// One by one only where some do not serve. A server whose engines have all ended refuses the list.
async function readReplicas(now, health) {
  if (health.status !== "degraded" && !readings.isPartlyUp(now)) return [];
  return (await (await ask("v1/replicas")).json()).data;
}

async function run() {
  for (;;) {
    await look();
    await new Promise((wake) => setTimeout(wake, EVERY_MS));
  }
}

part("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(part("key").value.trim());
  part("key").value = "";
  part("key-form").hidden = true;
  refreshModels();
});
startViews(look);
startKeys();
startChat(wantKey);
run();
