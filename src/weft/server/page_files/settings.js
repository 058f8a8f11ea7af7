// The settings of a conversation: system prompt, sampling, limit, tools. Each field of the form names its setting
// (`data-setting`), which is the name of the API; an empty field leaves it to the server, and shows what that is.

import {part} from "./draw.js";
import {answerTokens, chooseModel, chosenModel} from "./models.js";

const fields = () => [...document.querySelectorAll("[data-setting]")];
const NOT_SENT = ["model", "system", "tools", "stop"];

export function startSettings(onChange) {
  for (const field of [...fields(), part("model-name")]) {
    field.addEventListener("change", () => {
      showDefaults();
      onChange(readSettings());
    });
  }
}

export function showSettings(settings) {
  for (const field of fields()) field.value = settings[field.dataset.setting] ?? "";
  if (settings.model) chooseModel(settings.model);
  showDefaults();
}

export function readSettings() {
  const read = {model: part("model-name").value};
  for (const field of fields()) {
    const value = field.type === "number" ? field.valueAsNumber : field.value.trim();
    if (value !== "" && !Number.isNaN(value)) read[field.dataset.setting] = value;
  }
  return read;
}

// What the server uses where a field is empty, and how many fields are not.
export function showDefaults() {
  const card = chosenModel();
  for (const field of fields()) {
    const name = field.dataset.setting;
    if (field.type === "number") field.placeholder = name === "max_tokens" ? answerTokens(card) : card?.chat_sampling?.[name] ?? "";
  }
  const count = fields().filter((field) => field.value !== "").length;
  part("settings-count").textContent = count ? ` (${count} changed)` : "";
}

// The fields of a request. Throws an Error where the tools are no JSON.
export function requestFields(settings) {
  const card = chosenModel();
  const own = Object.fromEntries(Object.entries(settings).filter(([name]) => !NOT_SENT.includes(name)));
  const stop = (settings.stop ?? "").split("\n").filter(Boolean);
  return {
    model: card?.id, max_tokens: answerTokens(card), ...card?.chat_sampling, ...own,
    ...(stop.length ? {stop} : {}), ...(settings.tools ? {tools: toolsOf(settings.tools)} : {}),
  };
}

function toolsOf(text) {
  try {
    const tools = JSON.parse(text);
    return Array.isArray(tools) ? tools : [tools];
  } catch (error) {
    throw new Error(`Settings, tools: ${error.message}`);
  }
}
