// Two views of one page, chat and server, by the part of the address after #; and light or dark.

import {part} from "./draw.js";

const THEME = "weft-theme";
const THEMES = ["auto", "light", "dark"];

// `onChange` is called when the other view is shown.
export function startViews(onChange) {
  addEventListener("hashchange", () => {
    show();
    onChange();
  });
  show();
  setTheme(localStorage.getItem(THEME) ?? "auto");
  part("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(part("theme").dataset.theme) + 1) % THEMES.length];
    localStorage.setItem(THEME, next);
    setTheme(next);
  });
}

export const isServerShown = () => location.hash === "#server";

function show() {
  const isServer = isServerShown();
  part("chat").hidden = isServer;
  part("server").hidden = !isServer;
  document.body.classList.toggle("chatting", !isServer);
  part("to-chat").ariaCurrent = isServer ? null : "page";
  part("to-server").ariaCurrent = isServer ? "page" : null;
  if (!isServer) part("ask").focus();
}

function setTheme(theme) {
  document.documentElement.style.colorScheme = theme === "auto" ? "light dark" : theme;
  part("theme").dataset.theme = theme;
  part("theme").textContent = {auto: "◐", light: "☀", dark: "☾"}[theme];
  part("theme").setAttribute("aria-label", `Colours: ${theme}`);
  part("theme").title = `Colours: ${theme}`;
}
