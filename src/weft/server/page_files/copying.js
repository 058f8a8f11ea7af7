// Text into the clipboard, at a click.

import {element} from "./draw.js";

export function copyButton(text) {
  const button = element("button", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    button.textContent = await copied(text()) ? "Copied" : "Not copied: select the text";
    setTimeout(() => { button.textContent = "Copy"; }, 3000);
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
