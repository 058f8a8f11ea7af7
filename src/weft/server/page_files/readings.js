// What is known of the server at one moment, and what two such moments say together. Nothing here touches the page.
//
//   /metrics  --parse-->  reading {at, model, values, byLabel, engines, models}  --rates(now, before)-->  per second, means of what came between

export const USES = [
  ["running_kv", "KV of running requests"], ["running_states", "their states"], ["shared_kv", "KV they share"],
  ["cached_kv", "cached KV"], ["cached_states", "cached states"], ["open", "free in part"], ["free", "free"],
];
export const LOSSES = [
  ["no_checkpoint", "lost: no state kept there"], ["evicted_state", "lost: its state was evicted"],
  ["evicted_kv", "lost: its KV was evicted"], ["not_ready", "lost: being computed"], ["salt", "lost: of another salt"],
  ["stored", "lost: slower to read from the store"], ["damaged", "lost: damaged in the store"],
  ["store_busy", "lost: the store was too slow"],
];
// Shares, and seconds of one bucket: of several engines their mean is told, not their sum.
const MEANS = ["kv_cache_usage_perc", "state_cache_usage_perc", "store_unreachable_seconds_total"];
const COMMON_LABELS = ["model_name", "engine"];
const LINE = /^([^\s{]+?):([^\s{]+)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([a-z_]+)="((?:[^"\\]|\\.)*)"/g;

// values[name] where a number has no label of its own, else byLabel[name][label]; both add up over the engines,
// except MEANS.
// engines[number] has the values of each engine, models[name] those of each model: several models have an engine each,
// and there are no engines then. Buckets are left out.
export function parse(text, at) {
  const reading = {at, model: "", values: {}, byLabel: {}, engines: {}, models: {}};
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : LINE.exec(line);
    if (!found || found[2].endsWith("_bucket")) continue;
    const own = [];
    let engine = "";
    for (const [, label, value] of (found[3] ?? "").matchAll(LABEL)) {
      const plain = value.replace(/\\(["\\])/g, "$1");
      if (label === "model_name") reading.model = plain;
      else if (label === "engine") engine = plain;
      else if (!COMMON_LABELS.includes(label)) own.push(plain);
    }
    const numbers = own.length ? (reading.byLabel[found[2]] ??= {}) : reading.values;
    const key = own.length ? own[0] : found[2];
    numbers[key] = (numbers[key] ?? 0) + Number(found[4]);
    if (own.length) continue;
    (reading.engines[engine] ??= {})[found[2]] = Number(found[4]);
    if (!reading.model) continue; // of the server, before one of its models was loaded
    const ofModel = reading.models[reading.model] ??= {};
    ofModel[found[2]] = (ofModel[found[2]] ?? 0) + Number(found[4]);
  }
  if (isSeveral(reading)) {
    reading.model = `${Object.keys(reading.models).length} models`;
    for (const name of MEANS) {
      const having = Object.values(reading.models).filter((numbers) => name in numbers);
      if (having.length) reading.values[name] /= having.length;
    }
    reading.engines = {};
    return reading;
  }
  const engines = Object.values(reading.engines);
  for (const name of MEANS) if (name in reading.values) reading.values[name] /= engines.filter((numbers) => name in numbers).length;
  for (const [number, numbers] of Object.entries(reading.engines)) if (!("engine_up" in numbers)) delete reading.engines[number];
  return reading;
}

// Per second between two readings; null without a first one, or where the server was started anew between them.
export function rate(now, before, name) {
  const gained = gain(now, before, name);
  return gained === null ? null : gained / (now.at - before.at);
}

// The mean of what a histogram got between two readings, null where it got nothing.
export function recentMean(now, before, name) {
  const count = gain(now, before, `${name}_count`);
  return count ? gain(now, before, `${name}_sum`) / count : null;
}

// The share of prompt tokens that was found, of the prompts between two readings.
export function recentHitRate(now, before) {
  const asked = gain(now, before, "prefix_cache_queries_total");
  return asked ? gain(now, before, "prefix_cache_hits_total") / asked : null;
}

function gain(now, before, name) {
  if (!before || now.at <= before.at) return null;
  const gained = (now.values[name] ?? 0) - (before.values[name] ?? 0);
  return gained >= 0 ? gained : null;
}

// [name, words, tokens] of all prompt tokens since the start: found, lost by reason, and new, which nobody had before.
export function promptTokens(reading) {
  const asked = reading.values.prefix_cache_queries_total ?? 0;
  const found = reading.values.prefix_cache_hits_total ?? 0;
  const lost = LOSSES.map(([name, words]) => [name, words, reading.byLabel.prefix_cache_lost_tokens_total?.[name] ?? 0]);
  const known = lost.reduce((sum, [, , tokens]) => sum + tokens, found);
  return [["found", "found", found], ...lost.filter(([, , tokens]) => tokens), ["new", "new", Math.max(0, asked - known)]];
}

// Drafts by source, [source, drafted, accepted], empty before the first one; tokens for each verify run; time saved, in words.
export function speculation(reading) {
  const drafted = reading.byLabel.spec_decode_num_draft_tokens_total ?? {};
  const accepted = reading.byLabel.spec_decode_num_accepted_tokens_total ?? {};
  const windows = reading.values.spec_decode_num_drafts_total ?? 0;
  const right = Object.values(accepted).reduce((sum, count) => sum + count, 0);
  const any = Object.values(drafted).some((count) => count);
  return {rows: any ? Object.entries(drafted).map(([source, count]) => [source, count, accepted[source] ?? 0]) : [],
          length: windows ? 1 + right / windows : 1, saved: savedWords(reading.values.spec_decode_saved_seconds ?? 0)};
}

function savedWords(seconds) {
  const size = Math.abs(seconds).toFixed(1);
  if (size === "0.0") return "no time saved yet";
  return seconds < 0 ? `${size} s slower than without drafts` : `${size} s saved`;
}

// Of a model that sees; empty for one that reads text alone.
export function adapters(reading) {
  const {values} = reading;
  if (!values.lora_loads_total) return "";
  return `Adapters: ${formatCount(values.lora_adapters)} in memory, ${formatBytes(values.lora_bytes)} of`
    + ` ${formatBytes(values.lora_budget_bytes)}; ${formatCount(values.lora_loads_total)} read,`
    + ` ${formatCount(values.lora_evictions_total)} were evicted.`;
}

export function pictureRows(reading) {
  const values = reading.values;
  if (!values.picture_rows_budget_bytes) return "";
  return `Pictures: rows of ${formatBytes(values.picture_rows_bytes)} of ${formatBytes(values.picture_rows_budget_bytes)};`
    + ` ${formatCount(values.pictures_encoded_total)} encoded, ${formatCount(values.pictures_reused_total)} reused,`
    + ` ${formatCount(values.pictures_dropped_total)} dropped, ${formatCount(values.pictures_waiting)} waiting.`;
}

// What the store holds and did, in one sentence; empty without a store.
export function storeState(reading) {
  const values = reading.values;
  if (!values.store_capacity_bytes) return "";
  const writes = reading.byLabel.store_writes_total ?? {};
  return `Store: ${counted(values.store_checkpoints, "snapshot")} in ${formatBytes(values.store_bytes)}`
    + ` of ${formatBytes(values.store_capacity_bytes)}; ${formatCount(values.store_restored_tokens_total)} tokens read`
    + ` instead of computed, ${formatSeconds(values.store_saved_seconds_total)} saved;`
    + ` ${formatCount(values.store_damaged_total)} damaged, ${formatCount(writes.dropped)} writes dropped.`
    + bucketState(reading);
}

// What went wrong with the bucket behind it; empty without a bucket, and while all is well.
function bucketState(reading) {
  const awaySeconds = reading.values.store_unreachable_seconds_total ?? 0;
  const waiting = reading.values.store_uploads_waiting ?? 0;
  const lost = reading.byLabel.store_uploads_total?.lost ?? 0;
  if (!awaySeconds && !lost) return "";
  return ` Bucket: unreachable for ${formatSeconds(awaySeconds)} so far, ${formatCount(waiting)} uploads wait,`
    + ` ${formatCount(lost)} lost.`;
}

export function isSeveral(reading) {
  return "model_loaded" in reading.values;
}

export function sleepState(reading) {
  if (isSeveral(reading)) return `${reading.values.model_loaded} of ${Object.keys(reading.models).length} models loaded`;
  const count = Object.keys(reading.engines ?? {}).length;
  const up = reading.values.engine_up ?? 0;
  if (!up) return "the engine is not there";
  if (up < count) return `${up} of ${count} engines up`;
  const states = reading.byLabel.engine_sleep_state ?? {};
  if (states.weights_offloaded) return "asleep: weights in host memory";
  if (states.discard_all) return "asleep: weights dropped";
  return "up";
}

export function isPartlyUp(reading) {
  const up = reading.values.engine_up ?? 0;
  return up > 0 && up < Object.keys(reading.engines).length;
}

export function engineState(number, values, replicas) {
  if (values.engine_up) return "up";
  const row = replicas.find((one) => String(one.replica) === number);
  if (!row) return "not up";
  return row.state === "waiting" ? "restarting" : row.state;
}

export function formatBytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; size >= 1024 && unit < units.length - 1; unit++) size /= 1024;
  return `${unit && size < 100 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

export function formatCount(value) {
  if (value === null || value === undefined) return "–";
  return Math.round(value).toLocaleString("en");
}

// "1 state", "2 states".
export function counted(count, noun) {
  return `${formatCount(count)} ${noun}${Math.round(count) === 1 ? "" : "s"}`;
}

export function formatSeconds(seconds) {
  if (seconds === null) return "–";
  return seconds < 1 ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`;
}

export function formatAge(seconds) {
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= size) return `${Math.round(seconds / size)} ${unit} ago`;
  }
  return `${Math.round(seconds)} s ago`;
}
