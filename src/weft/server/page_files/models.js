// The models and adapters of the server, as /v1/models lists them.

import {element, part} from "./draw.js";
import {ask} from "./server.js";

const ANSWER_TOKENS = 4096;  // as in `weft chat`
let cards = [];

// Reads the list anew, and keeps the choice where it is still there.
export async function listModels() {
  cards = (await (await ask("v1/models")).json()).data;
  const field = part("model-name");
  const words = cards.map((card) => card.state && card.state !== "loaded" ? `${card.id} (${card.state})` : card.id);
  if (words.join() !== [...field.options].map((option) => option.textContent).join()) {
    const chosen = field.value;
    field.replaceChildren(...words.map((text, place) => {
      const option = element("option", text);
      option.value = cards[place].id;
      return option;
    }));
    chooseModel(chosen);
  }
  part("model-choice").hidden = cards.length < 2;
  return cards;
}

export const allModels = () => cards;

// The first one where `id` is not served.
export function chooseModel(id) {
  if (cards.length) part("model-name").value = cards.some((card) => card.id === id) ? id : cards[0].id;
}

export function chosenModel() {
  return cards.find((card) => card.id === part("model-name").value);
}

// The longest answer without a limit of the user's: a small model may never end one, and half of the context stays for
// later turns.
export function answerTokens(card) {
  return Math.min(ANSWER_TOKENS, card?.max_model_len ? Math.floor(card.max_model_len / 2) : ANSWER_TOKENS);
}
