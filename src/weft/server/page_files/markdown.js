// Markdown of a model to elements. A model's text is a stranger's: HTML in it is shown as text, pictures as links, and
// what the parser makes goes through a sanitiser with a short list of elements. The server's Content-Security-Policy
// would stop a script that gets through both.
//
//   text --marked's lexer--> blocks --parser--> HTML --DOMPurify--> elements, one <div> for each block
//
// An answer grows while it is read: a block whose source is unchanged keeps its elements, and with them a selection.

import {colour} from "./colours.js";
import {element} from "./draw.js";
import {copyButton} from "./copying.js";
import {Marked} from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";

const ALLOWED = {
  ALLOWED_TAGS: ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "blockquote",
                 "ul", "ol", "li", "a", "table", "thead", "tbody", "tr", "th", "td", "input"],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const escaped = (text) => text.replace(/[&<>"']/g, (one) => `&#${one.charCodeAt(0)};`);
const marked = new Marked({gfm: true, breaks: true, renderer: {
  html: ({text}) => escaped(text),
  image: ({href, text}) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
}});

// The function that shows a text in `box`, called again with each longer one.
export function markdownIn(box) {
  let shown = [];  // sources of the blocks that are in the box
  return (text) => {
    const blocks = marked.lexer(text);
    let same = 0;
    while (same < shown.length && same < blocks.length && shown[same] === blocks[same].raw) same++;
    while (box.children.length > same) box.lastElementChild.remove();
    for (const block of blocks.slice(same)) box.append(elementsOf(block));
    shown = blocks.map(({raw}) => raw);
  };
}

function elementsOf(block) {
  const made = element("div");
  made.append(DOMPurify.sanitize(marked.parser([block]).trim(), ALLOWED));
  for (const link of made.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const field of made.querySelectorAll("input")) {
    field.type = "checkbox";
    field.disabled = true;
  }
  for (const table of made.querySelectorAll("table")) scrolled(table);
  for (const code of made.querySelectorAll("pre > code")) {
    const head = element("div", "", "code-head");
    const language = /language-(\S+)/.exec(code.className)?.[1] ?? "text";
    head.append(element("span", language), copyButton(() => code.textContent));
    colour(code, language);
    code.parentElement.tabIndex = 0;  // so that long lines can be scrolled by keys
    code.parentElement.role = "group";
    code.parentElement.ariaLabel = `Code: ${language}`;
    code.parentElement.before(head);
  }
  return made;
}

function scrolled(table) {
  const frame = element("div", "", "scroll");
  table.replaceWith(frame);
  frame.append(table);
}
