// The view of the server: tiles, tables and bars, drawn anew from each reading.

import {copyButton} from "./copying.js";
import {drawHistory, drawLine, drawParts, element, fillRows, part, shape} from "./draw.js";
import {chosenModel} from "./models.js";
import * as readings from "./readings.js";
import {ask} from "./server.js";

export const EVERY_MS = 1000;
const KEPT = 300;  // readings, five minutes
const RECENT = 10;  // readings over which rates and means are taken
const DEPTHS_SHOWN = 14;
const kept = [];

const {counted, formatBytes, formatCount, formatSeconds} = readings;
const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)} %`);
const colour = (name) => `var(--${name.replace("_", "-")})`;
const LOSS_COLOURS = {found: "var(--running-kv)", no_checkpoint: "var(--cached-states)", evicted_state: "var(--bad)",
                      evicted_kv: "var(--cached-kv)", not_ready: "var(--shared-kv)", salt: "var(--open)",
                      stored: "var(--running-kv)", damaged: "var(--running-kv)", store_busy: "var(--running-kv)",
                      new: "var(--free)"};

const TILES = [
  ["running", (now) => now.values.num_requests_running ?? 0, formatCount],
  ["waiting", (now) => now.values.num_requests_waiting ?? 0, formatCount],
  ["tokens out / s", (now, before) => readings.rate(now, before, "generation_tokens_total"), formatCount],
  ["computed / s", (now, before) => readings.rate(now, before, "computed_tokens_total"), formatCount],
  ["prompts from cache", readings.recentHitRate, percent],
  ["to the first token", (now, before) => readings.recentMean(now, before, "time_to_first_token_seconds"), formatSeconds],
  ["between tokens", (now, before) => readings.recentMean(now, before, "inter_token_latency_seconds"), formatSeconds],
];
const tileNumbers = TILES.map(() => []);
const tiles = TILES.map(([words]) => {
  const tile = element("div", "", "tile");
  const number = element("b", "–");
  const line = shape("svg");
  tile.append(number, element("span", words, "quiet"), line);
  part("tiles").append(tile);
  return {number, line};
});

// Keeps a reading. Returns the oldest one that is kept.
export function keepReading(now) {
  kept.push(now);
  if (kept.length > KEPT) kept.shift();
  return kept[0];
}

const recent = () => (kept.length > 1 ? kept[Math.max(0, kept.length - 1 - RECENT)] : null);

// Tiles and history go on while the chat is shown.
export function drawNumbers(now) {
  drawTiles(now);
  drawMemory(now);
}

export async function drawServer(now, replicas, cards) {
  drawEngines(now, replicas);
  if (readings.isSeveral(now)) drawModels(now, cards);
  part("picture-rows").textContent = readings.pictureRows(now);
  part("adapters").textContent = readings.adapters(now);
  drawPrompts(now);
  drawSpeculation(now);
  await drawCache(now);
}

export function drawFaults(faults) {
  const words = JSON.stringify(faults);
  if (part("faults").dataset.words === words) return;  // a reader of the list would lose its place
  part("faults").dataset.words = words;
  part("faults").replaceChildren(...faults.map(({what, why, mend, command}) => {
    const row = element("li");
    row.append(element("b", what), ...(why ? [element("p", why)] : []), ...(mend ? [element("p", mend, "quiet")] : []));
    if (command) {
      const line = element("div", "", "row"), code = element("code", command);
      line.append(code, copyButton(() => command));
      row.append(line);
    }
    return row;
  }));
  part("no-faults").hidden = faults.length > 0;
}

function drawTiles(now) {
  const before = recent();
  TILES.forEach(([, number, format], place) => {
    const value = number(now, before);
    const numbers = tileNumbers[place];
    numbers.push(value);
    if (numbers.length > KEPT) numbers.shift();
    tiles[place].number.textContent = format(value);
    drawLine(tiles[place].line, numbers, KEPT);
  });
}

function drawEngines(now, replicas) {
  const engines = Object.entries(now.engines);
  part("engines-card").hidden = engines.length < 2;
  const before = recent();
  fillRows(part("engines"), engines.map(([number, values]) => {
    const row = element("tr");
    const past = before?.engines[number];
    const speed = past ? readings.rate({at: now.at, values}, {at: before.at, values: past}, "generation_tokens_total") : null;
    row.append(element("td", number), element("td", readings.engineState(number, values, replicas)), ...[values.num_requests_running,
      values.num_requests_waiting, speed, values.engine_restarts_total].map((value) => element("td", formatCount(value))));
    return row;
  }));
}

const MODEL_COLOURS = ["running_kv", "shared_kv", "cached_kv", "cached_states", "running_states", "open"];

function drawModels(now, cards) {
  const models = cards.filter((card) => !card.parent).map((card) => ({...card, values: now.models[card.id] ?? {}}));
  const before = recent();
  part("models-card").hidden = false;
  const taken = now.values.model_memory_bytes ?? 0;
  const budget = Math.max(taken, ...models.map(({values}) => values.model_memory_budget_bytes ?? 0));
  part("models-total").textContent = `${formatBytes(taken)} of ${formatBytes(budget)} taken`;
  drawParts(part("models-bar"), part("models-legend"), [...models.map(({id, values}, place) => ({
    words: id, size: values.model_memory_bytes ?? 0, colour: colour(MODEL_COLOURS[place % MODEL_COLOURS.length]),
    shown: formatBytes(values.model_memory_bytes ?? 0)})).filter(({size}) => size),
    {words: "free", size: budget - taken, colour: colour("free"), shown: formatBytes(budget - taken)}]);
  fillRows(part("models"), models.map(({id, state, values}) => {
    const row = element("tr");
    const past = before?.models[id];
    const speed = past ? readings.rate({at: now.at, values}, {at: before.at, values: past}, "generation_tokens_total") : null;
    row.append(element("td", id), element("td", state), element("td", formatBytes(values.model_memory_bytes ?? 0)),
               ...[values.num_requests_running ?? 0, (values.num_requests_waiting ?? 0) + (values.model_requests_waiting ?? 0), speed,
                   values.model_loads_total].map((value) => element("td", formatCount(value))));
    return row;
  }));
}

// Of several models, the cache of the one that is chosen to be asked.
async function drawCache(now) {
  if (!readings.isSeveral(now)) {
    if (now.values.engine_up) drawTree(await (await ask("v1/cache")).json());
    return;
  }
  const name = chosenModel()?.parent ?? chosenModel()?.id;
  const cache = (await (await ask("v1/cache")).json()).models[name];
  drawTree(cache ?? {});
  part("tree-total").textContent = cache ? `of ${name}: ${part("tree-total").textContent}` : `${name} is not loaded`;
}

function drawMemory(now) {
  const uses = now.byLabel.memory_bytes ?? {};
  const total = Object.values(uses).reduce((sum, size) => sum + size, 0);
  part("memory-total").textContent = total ? formatBytes(total) : "given back, or not known yet";
  drawParts(part("memory-bar"), part("memory-legend"), readings.USES.map(([name, words]) => ({
    words, size: uses[name] ?? 0, colour: colour(name),
    shown: `${formatBytes(uses[name] ?? 0)}, ${percent(total ? (uses[name] ?? 0) / total : 0)}`})));
  drawHistory(part("memory-history"), kept.map((reading) => readings.USES.map(([name]) => reading.byLabel.memory_bytes?.[name] ?? 0)),
              KEPT, readings.USES.map(([name]) => colour(name)));
  part("memory-span").textContent = `the last ${Math.round(now.at - kept[0].at)} s; the whole width is ${KEPT * EVERY_MS / 60000} minutes`;
}

function drawPrompts(now) {
  const asked = now.values.prefix_cache_queries_total ?? 0;
  part("prompt-total").textContent = `${formatCount(asked)} since the start`;
  drawParts(part("prompt-bar"), part("prompt-legend"), readings.promptTokens(now).map(([name, words, tokens]) => ({
    words, size: tokens, colour: LOSS_COLOURS[name], shown: `${formatCount(tokens)}${asked ? `, ${percent(tokens / asked)}` : ""}`})));
  const list = (counts) => Object.entries(counts ?? {}).filter(([, count]) => count).map(([kind, count]) => counted(count, kind)).join(", ") || "nothing";
  part("store").textContent = readings.storeState(now);
  part("gave-way").textContent = `evicted: ${list(now.byLabel.prefix_cache_evictions_total)}; moved to empty frames: ` +
    `${list(now.byLabel.compaction_moves_total)}; computed again: ${counted(now.values.recomputed_tokens_total ?? 0, "token")}; ` +
    `preemptions: ${formatCount(now.values.num_preemptions_total ?? 0)}`;
}

function drawSpeculation(now) {
  const {rows, length, saved} = readings.speculation(now);
  part("speculation").hidden = !rows.length;
  part("speculation-total").textContent = `${length.toFixed(2)} tokens for each verify run, ${saved}`;
  fillRows(part("sources"), rows.map(([source, drafted, accepted]) => {
    const row = element("tr");
    row.append(element("td", source), element("td", formatCount(drafted)), element("td", formatCount(accepted)),
               element("td", percent(drafted ? accepted / drafted : null)));
    return row;
  }));
}

function prefixName(prefix) {
  const cell = element("td", prefix.label);
  cell.className = "prefix";
  if (prefix.text !== undefined) {
    cell.textContent = prefix.text;
    cell.title = prefix.label;
  }
  return cell;
}

function drawTree(cache) {
  const tree = cache.tree ?? {prefixes: [], by_depth: []};
  part("tree-total").textContent = cache.tree ? `${counted(cache.nodes, "node")}, ${counted(cache.states, "state")}` +
    `${cache.states_compressed ? ` (${formatCount(cache.states_compressed)} compressed in 8 bits)` : ""}, ${formatBytes(cache.bytes)}` : "";
  const rows = tree.prefixes.map((prefix) => {
    const row = element("tr");
    const saved = prefix.saved_s === null ? `${formatCount(prefix.tokens_saved)} tokens` : formatSeconds(prefix.saved_s);
    row.append(prefixName(prefix), element("td", prefix.snapshot ? "state and KV" : "KV only"), element("td", formatCount(prefix.tokens)),
               element("td", formatBytes(prefix.bytes)), element("td", formatCount(prefix.hits)), element("td", saved),
               element("td", formatCount(prefix.branches)), element("td", formatCount(prefix.readers)),
               element("td", readings.formatAge(prefix.age_s)));
    return row;
  });
  if (!rows.length) {
    const none = element("td", "no prefix is shared yet", "quiet");
    none.colSpan = 9;
    rows.push(element("tr"));
    rows[0].append(none);
  }
  fillRows(part("prefixes"), rows);
  const most = Math.max(...tree.by_depth.map((depth) => depth.bytes), 1);
  part("depths").replaceChildren(...tree.by_depth.slice(0, DEPTHS_SHOWN).flatMap((depth) => {
    const bar = element("div");
    bar.style.width = `${100 * depth.bytes / most}%`;
    return [element("span", `to ${formatCount(depth.tokens_max)} tokens`), bar,
            element("span", `${formatBytes(depth.bytes)}, ${counted(depth.snapshots, "state")}`)];
  }));
}
