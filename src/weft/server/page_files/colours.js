// Colours of code, by highlight.js, which comes with the first code that it can colour. It reads a stranger's text, so
// what it makes goes through the sanitiser too: spans with a class, and the text that was there before.

import "./vendor/purify.min.js";

const CHARACTERS_MAX = 30_000;  // a longer code stays as it is: the last block is coloured again with each token
const SPANS = {ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true};
let library;  // undefined: not asked for; a promise: it comes; then the library, or null where it did not come

// Colour the element `code`, now or when the library is there.
export function colour(code, language) {
  const text = code.textContent;
  if (!language || language === "text" || text.length > CHARACTERS_MAX || library === null) return;
  if (library === undefined) {
    library = import("./vendor/highlight.min.js").then((module) => { library = module.default; },
                                                       () => { library = null; });
  }
  if (library instanceof Promise) {
    library.then(() => colour(code, language));
    return;
  }
  if (!library.getLanguage(language)) return;
  const {value} = library.highlight(text, {language, ignoreIllegals: true});
  const coloured = DOMPurify.sanitize(value, SPANS);
  if (coloured.textContent === text) code.replaceChildren(coloured);
}
