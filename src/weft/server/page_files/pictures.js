// Pictures and videos of the next message: chosen, dropped on the form, or pasted. They leave this tab with the message
// alone.

import {element, part} from "./draw.js";

let waiting = [];   // {name, film, url}, the url with the file in it

export function startPictures() {
  const form = part("ask-form"), file = part("picture-file");
  part("picture").addEventListener("click", () => file.click());
  file.addEventListener("change", async () => {
    await add(file.files);
    file.value = "";
  });
  part("ask").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
  form.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    form.classList.add("over");
  });
  form.addEventListener("dragleave", (event) => {
    if (!form.contains(event.relatedTarget)) form.classList.remove("over");
  });
  form.addEventListener("drop", (event) => {
    form.classList.remove("over");
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    add(event.dataTransfer.files);
  });
}

// A file that the browser cannot show is kept too: the server says what is wrong with it.
async function add(files) {
  const read = await Promise.all([...files].map(async (file) => ({name: file.name, film: isFilm(file), url: await urlOf(file)})));
  setPictures([...waiting, ...read]);
  part("ask").focus();
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

export const waitingPictures = () => waiting;

export function setPictures(pictures) {
  waiting = pictures;
  part("pictures").replaceChildren(...pictures.map((picture) => {
    const button = element("button");
    button.type = "button";
    button.title = `Leave out ${picture.name}`;
    button.append(thumbnail(picture));
    button.addEventListener("click", () => setPictures(waiting.filter((one) => one !== picture)));
    return button;
  }));
}

// A video that this browser cannot play is shown by its name, as pictures are.
export function thumbnail({name, film, url}) {
  const shown = element(film ? "video" : "img");
  if (film) {
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

// A message of text and pictures, as the API takes it.
export function contentOf(text, pictures) {
  if (!pictures.length) return text;
  const parts = pictures.map(({film, url}) => film ? {type: "video_url", video_url: {url}} : {type: "image_url", image_url: {url}});
  return [...parts, ...(text ? [{type: "text", text}] : [])];
}
