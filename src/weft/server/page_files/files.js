// Files of the next message: chosen, dropped on the chat, or pasted. Pictures and videos go as they are, every other file
// as text. They leave this browser with the message alone.

import {element, part} from "./draw.js";

let waiting = [];   // {name, kind: image | video | text, url | text}

export function startFiles(onRefused) {
  const file = part("attach-file"), place = part("chat");
  const add = (files) => addFiles(files).catch((error) => onRefused(error.message));
  part("attach").addEventListener("click", () => file.click());
  file.addEventListener("change", async () => {
    await add(file.files);
    file.value = "";
  });
  part("ask").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
  place.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    place.classList.add("over");
  });
  place.addEventListener("dragleave", (event) => {
    if (!place.contains(event.relatedTarget)) place.classList.remove("over");
  });
  place.addEventListener("drop", (event) => {
    place.classList.remove("over");
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    add(event.dataTransfer.files);
  });
}

// Adds those that can be read, then throws an Error that names the first one that cannot.
async function addFiles(files) {
  const read = await Promise.allSettled([...files].map(readFile));
  setFiles([...waiting, ...read.filter(({value}) => value).map(({value}) => value)]);
  part("ask").focus();
  const refused = read.find(({reason}) => reason);
  if (refused) throw refused.reason;
}

// A picture or video that the browser cannot show is kept too: the server says what is wrong with it.
async function readFile(file) {
  const {name} = file;
  if (isFilm(file)) return {name, kind: "video", url: await urlOf(file)};
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") return {name, kind: "image", url: await urlOf(file)};
  try {
    const text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return {name, kind: "text", text};
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;  // a TypeError: bytes that are no UTF-8
  }
  throw new Error(`${name} is neither a picture, nor a video, nor text in UTF-8`);
}

// Browsers know no type of some files of videos.
const isFilm = ({name, type}) => type.startsWith("video/") || /\.(mp4|m4v|mov|webm|mkv|avi)$/i.test(name);

function urlOf(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}

export const waitingFiles = () => waiting;

export function setFiles(files) {
  waiting = files;
  part("files").replaceChildren(...files.map((file) => {
    const button = element("button");
    button.type = "button";
    button.title = `Leave out ${file.name}`;
    button.append(thumbnail(file), element("span", "×", "quiet"));
    button.addEventListener("click", () => {
      setFiles(waiting.filter((one) => one !== file));
      part("ask").focus();
    });
    return button;
  }));
}

// A video that this browser cannot play is shown by its name, as pictures are.
export function thumbnail({name, kind, url, text}) {
  if (kind === "text") return element("span", `${name}, ${text.length.toLocaleString("en")} characters`, "file");
  const shown = element(kind === "video" ? "video" : "img");
  if (kind === "video") {
    shown.muted = true;
    shown.preload = "auto";   // its first frame is what is seen of it
    shown.setAttribute("aria-label", name);
    shown.addEventListener("error", () => shown.replaceWith(element("span", name)));
  } else {
    shown.alt = name;
  }
  shown.src = url;
  return shown;
}
