// One conversation with the model. Its later turns are what a prefix cache is for: each answer says how many of its
// prompt's tokens were cached.

import {element, part} from "./draw.js";
import {contentOf, setPictures, startPictures, thumbnail, waitingPictures} from "./pictures.js";
import {ask, events} from "./server.js";

let cards = [];  // of /v1/models
let messages = [];
let stopper = null;

export function startAsking(onKeyWanted) {
  startPictures();
  listModels().catch(onKeyWanted);
  part("model-name").addEventListener("change", showSampling);
  part("settings").addEventListener("toggle", () => listModels().catch(onKeyWanted));
  part("ask-form").addEventListener("submit", (event) => {
    event.preventDefault();
    turn(onKeyWanted);
  });
  part("ask").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      turn(onKeyWanted);
    }
  });
  part("stop").addEventListener("click", () => stopper?.abort());
  part("forget").addEventListener("click", () => {
    stopper?.abort();
    messages = [];
    setPictures([]);
    part("talk").replaceChildren();
    part("welcome").hidden = false;
    part("ask").focus();
  });
}

async function turn(onKeyWanted) {
  const field = part("ask");
  const said = field.value.trim();
  const pictures = waitingPictures();
  if ((!said && !pictures.length) || stopper) return;
  const talk = messages;
  const shown = element("p", "", "answer");
  const thought = folded("Reasoning");
  const note = element("p", "", "quiet");
  const copy = copyButton(shown);
  const seen = element("div", "", "row");
  seen.append(...pictures.map(thumbnail));
  part("talk").append(element("p", said, "user"), ...(pictures.length ? [seen] : []), thought, shown, copy, note);
  field.value = "";
  setPictures([]);
  part("welcome").hidden = true;
  stopper = new AbortController();
  setBusy(true);
  const begun = performance.now();
  if (["absent", "failed", "loading"].includes(chosenModel()?.state)) note.textContent = `${chosenModel().id} is loaded first … `;
  const question = {role: "user", content: contentOf(said, pictures)};
  let text = "", usage = null, first = null;
  try {
    const answer = await ask("v1/chat/completions", {
      method: "POST", signal: stopper.signal, headers: {"Content-Type": "application/json"},
      body: JSON.stringify({model: part("model-name").value || undefined, messages: [...systemPrompt(), ...talk, question], stream: true,
                            stream_options: {include_usage: true}, ...sampling(), max_tokens: part("max-tokens").valueAsNumber || undefined}),
    });
    note.textContent = "";
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const delta = event.choices?.[0]?.delta ?? {};
      if (delta.reasoning) {
        thought.hidden = false;
        thought.lastChild.textContent += delta.reasoning;
      }
      const piece = delta.content ?? "";
      if (piece) first ??= performance.now() - begun;
      text += piece;
      shown.textContent = text;
    }
    talk.push(question, {role: "assistant", content: text});
  } catch (error) {
    if (error.name === "AbortError") {
      note.textContent = "stopped; ";
    } else {
      note.textContent = "";
      onKeyWanted(error);
      shown.className = "failed";
      shown.textContent = error.message;
      field.value ||= said;
      if (!waitingPictures().length) setPictures(pictures);
    }
  } finally {
    stopper = null;
    setBusy(false);
    copy.hidden = !text;
  }
  if (usage) {
    note.textContent += `${usage.prompt_tokens} prompt tokens, ${usage.prompt_tokens_details?.cached_tokens ?? 0} of them cached; ` +
      `first text after ${Math.round(first ?? 0)} ms, ${usage.completion_tokens} tokens in ${Math.round(performance.now() - begun)} ms`;
  }
}

// The models and their adapters, as they are now; of a single one without adapters there is nothing to choose.
export async function listModels() {
  cards = (await (await ask("v1/models")).json()).data;
  const field = part("model-name");
  const chosen = field.value;
  const words = cards.map((card) => card.state && card.state !== "loaded" ? `${card.id} (${card.state})` : card.id);
  if (words.join() !== [...field.options].map((option) => option.textContent).join()) {
    field.replaceChildren(...words.map((text, place) => {
      const option = element("option", text);
      option.value = cards[place].id;
      return option;
    }));
    field.value = cards.some((card) => card.id === chosen) ? chosen : cards[0].id;
  }
  showSampling();
  part("model-choice").hidden = !cards.some((card) => card.parent || card.state);
  return cards;
}

export function chosenModel() {
  return cards.find((card) => card.id === part("model-name").value);
}

// Where the fields are empty, the model's own sampling as the server lists it.
function sampling() {
  const given = part("temperature").value === "" ? {} : {temperature: part("temperature").valueAsNumber};
  return {...chosenModel()?.chat_sampling, ...given};
}

function showSampling() {
  part("temperature").placeholder = chosenModel()?.chat_sampling.temperature ?? "";
}

// The system prompt is of every turn, so that it can be changed in the middle of a conversation.
function systemPrompt() {
  const text = part("system").value.trim();
  return text ? [{role: "system", content: text}] : [];
}

function folded(title) {
  const box = element("details", "");
  box.append(element("summary", title), element("p", "", "quiet"));
  box.hidden = true;
  return box;
}

function copyButton(source) {
  const button = element("button", "Copy");
  button.type = "button";
  button.hidden = true;
  button.addEventListener("click", async () => {
    button.textContent = await copied(source.textContent) ? "Copied" : "Not copied: select the text";
  });
  return button;
}

// Browsers have no clipboard object on a page without TLS, but for pages of their own machine.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = element("textarea", text);
    document.body.append(field);
    field.select();
    const worked = document.execCommand("copy");
    field.remove();
    return worked;
  }
}

function setBusy(busy) {
  part("send").disabled = busy;
  part("stop").hidden = !busy;
}
