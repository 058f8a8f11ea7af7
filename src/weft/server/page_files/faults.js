// What is wrong with the server now, each with the command that mends it. Nothing here touches the page.
//
//   /health, /v1/replicas, /v1/models, counters of /metrics since `first`  -->  [{what, why, mend, command}]
//
// A counter tells of a fault while it grew within the readings that the page keeps, which are of five minutes.

const CODES = {
  too_many_connections: "limits.max_connections and limits.max_connections_per_address: behind a proxy all clients have its address",
  body_too_large: "limits.max_body_mb",
  server_buffers_full: "limits.max_buffered_mb",
};
const GROWN = [  // [counter, label, what, why, what to do, command]
  ["admission_rejections_total", "queue_full", (count) => `${counted(count, "request")} found the queue full.`, "",
   "More replicas, or a longer queue (limits.max_queued_requests).", "weft serve MODEL --replicas 2"],
  ["num_preemptions_total", null, (count) => `${counted(count, "running answer")} ${count === 1 ? "was" : "were"} preempted and will be computed again.`,
   "The memory for running requests is short.", "More memory, or fewer sequences at once.", "weft plan MODEL --memory SIZE"],
  ["engine_restarts_total", null, (count) => `${counted(count, "engine process", "engine processes")} ended and started again.`, "",
   "Requests went on; the log has what ended them.", "journalctl -u weft --since -10min"],
  ["request_deadly_total", null, (count) => `Engine processes died of ${counted(count, "request")}.`, "",
   "The log has their ids.", "journalctl -u weft --since -10min"],
  ["store_damaged_total", null, (count) => `The store had ${counted(count, "damaged prefix", "damaged prefixes")}; computed again.`, "",
   "Check the disk; what is damaged is never read again.", "journalctl -k --since -10min"],
  ["store_writes_total", "dropped", (count) => `The store was too slow to write ${counted(count, "snapshot")}.`, "",
   "A faster disk for --store, or fewer snapshots.", "weft serve MODEL --snapshots every:1024"],
  ["store_uploads_total", "lost", (count) => `The store lost ${counted(count, "upload")} to its bucket.`, "",
   "Check the bucket and its credentials.", "journalctl -u weft --since -10min"],
  ["handoff_failures_total", null, (count) => `${counted(count, "prompt")} did not get to another engine.`, "",
   "They are computed again; the log has the reason.", "journalctl -u weft --since -10min"],
];

// `url`: of the server; `hasKey`: whether it wants one, which commands read from WEFT_OPERATOR_KEY.
export function faultsOf({health, replicas, cards, now, first, url, hasKey}) {
  const at = url.replace(/\/$/, "");
  const named = at === "http://127.0.0.1:8000" ? "" : ` --url ${at}`;
  const post = (path) => `curl -X POST${hasKey ? ' -H "Authorization: Bearer $WEFT_OPERATOR_KEY"' : ""} ${at}${path}`;
  return [
    ...ofHealth(health, replicas, post),
    ...replicas.flatMap((row) => ofReplica(row, named, cards.some(({state}) => state))),
    ...cards.filter(({state, parent}) => state === "failed" && !parent).map((card) => fault(
      `The model ${card.id} does not load.`, card.reason, "Mend that; the next request for it tries again.", "weft doctor")),
    ...ofCounters(now, first),
  ];
}

const counted = (count, one, several = `${one}s`) => `${Math.round(count).toLocaleString("en")} ${Math.round(count) === 1 ? one : several}`;
const fault = (what, why = "", mend = "", command = "") => ({what, why, mend, command});

function ofHealth({status, reason, store}, replicas, post) {
  const made = [];
  if (status === "dead") made.push(fault("Nothing computes any more.", reason, "Start the server again. As a unit of systemd:", "systemctl restart weft"));
  if (status === "draining") made.push(fault("The server shuts down.", reason, "New requests are refused. To start it again:", "systemctl start weft"));
  if (status === "starting") made.push(fault("The server starts.", reason, "Requests are served when it is ready."));
  if (status === "degraded" && !replicas.some(({state}) => ["dead", "away", "waiting", "starting"].includes(state))) {
    made.push(fault("An engine process is not up.", reason, "Requests wait or run elsewhere while it starts again."));
  }
  if (status === "sleeping") made.push(fault("The server sleeps.", "Requests are refused.", "To wake it:", post("/wake_up")));
  if (status === "paused") made.push(fault("The server is paused.", "Requests wait.", "To go on:", post("/resume")));
  if (store) made.push(fault("The bucket of the store does not answer.", store, "Snapshots wait on this machine; the log has the whole reason.", "journalctl -u weft --since -10min"));
  return made;
}

function ofReplica({replica, host, state, reason, model}, named, isSeveral) {
  const name = `Engine ${replica}${isSeveral ? ` of ${model}` : ""}${host ? ` on ${host}` : ""}`;
  switch (state) {
    case "dead": return [fault(`${name} is dead: its restarts are used up.`, reason, "To start it again:", `weft drain ${replica} --start${named}`)];
    case "drained": return [fault(`${name} is drained.`, "", "It serves again after:", `weft drain ${replica} --start${named}`)];
    case "away": return [fault(`${name} is away: its machine cannot be reached.`, reason, "On that machine:", "weft join ADDRESS")];
    case "waiting": case "starting": return [fault(`${name} restarts.`, reason, "Its requests go on at others, or wait.")];
    default: return [];
  }
}

function ofCounters(now, first) {
  if (!now || !first || now === first) return [];
  const read = ({values, byLabel}, name, label) => (label ? byLabel[name]?.[label] : values[name]) ?? 0;
  const made = GROWN.flatMap(([name, label, words, why, mend, command]) => {
    const gained = read(now, name, label) - read(first, name, label);
    return gained > 0 ? [fault(words(gained), why, mend, command)] : [];
  });
  for (const [code, count] of Object.entries(now.byLabel.http_refusals_total ?? {})) {
    const gained = count - read(first, "http_refusals_total", code);
    if (gained > 0) made.push(fault(`A limit refused ${counted(gained, "request")}: ${code}.`, "", CODES[code] ? `The limit: ${CODES[code]}.` : "The log names them."));
  }
  return made;
}
