// The page /docs: /openapi.json for readers. Every text goes in as text, never as HTML.

const METHODS = ["get", "post", "delete"];

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function resolve(document_, schema) {
  const name = schema?.$ref?.split("/").pop();
  return name ? { name, ...document_.components.schemas[name] } : schema ?? {};
}

// A type in a few words: "string", "array of integer", "ChatMessage or null".
export function typeText(schema) {
  if (!schema || !Object.keys(schema).length) return "any";
  if (schema.$ref) return schema.$ref.split("/").pop();
  const arms = schema.anyOf ?? schema.oneOf;
  if (arms) return [...new Set(arms.map(typeText))].join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array") return `array of ${typeText(schema.items)}`;
  return Array.isArray(schema.type) ? schema.type.join(" or ") : schema.type ?? "any";
}

const LIMITS = {
  minimum: (value) => `at least ${value}`, exclusiveMinimum: (value) => `above ${value}`,
  maximum: (value) => `at most ${value}`, minLength: (value) => `at least ${value} characters`,
  maxLength: (value) => `at most ${value} characters`, minItems: (value) => `at least ${value} items`,
  maxItems: (value) => `at most ${value} items`,
};

// "at least 0, at most 2", from the schema and its arms. The limits of 64-bit numbers say nothing.
export function limitsText(schema) {
  const found = [];
  for (const part of [schema, ...(schema.anyOf ?? []), ...(schema.oneOf ?? [])]) {
    for (const [key, words] of Object.entries(LIMITS)) {
      if (key in part && Math.abs(part[key]) < 2 ** 62) found.push(words(part[key]));
    }
    if (part.items && !part.items.$ref) found.push(...limitsText(part.items).split(", ").filter(Boolean)
      .map((words) => `each ${words}`));
  }
  return [...new Set(found)].join(", ");
}

function fieldTable(schema) {
  const required = new Set(schema.required ?? []);
  const body = element("tbody");
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const given = "default" in field ? JSON.stringify(field.default) : required.has(name) ? "required" : "";
    body.append(element("tr", {},
      element("td", {}, element("code", {}, name)), element("td", {}, typeText(field)),
      element("td", {}, field.description ?? ""), element("td", {}, limitsText(field)),
      element("td", {}, given)));
  }
  const head = element("tr", {}, ...["field", "type", "meaning", "limits", "default"]
    .map((words) => element("th", {}, words)));
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), body));
}

function folded(title, ...children) {
  return element("details", {}, element("summary", {}, title), ...children);
}

function schemasOf(document_, content) {
  const schema = content?.["application/json"]?.schema;
  if (!schema) return [];
  return (schema.oneOf ?? schema.anyOf ?? [schema]).map((one) => resolve(document_, one));
}

function operationCard(document_, path, method, operation) {
  const card = element("section", { class: "card", id: operation.operationId },
    element("h2", {}, element("span", { class: "pill" }, method.toUpperCase()), " ",
      element("code", {}, path)),
    element("p", {}, operation.summary), element("p", { class: "quiet" }, operation.description ?? ""));
  if (operation.parameters) {
    card.append(folded("Parameters", fieldTable({
      properties: Object.fromEntries(operation.parameters.map((one) =>
        [one.name, { ...one.schema, description: one.description }])),
      required: operation.parameters.filter((one) => one.required).map((one) => one.name) })));
  }
  const media = Object.entries(operation.requestBody?.content ?? {});
  for (const [, { schema }] of media.filter(([name]) => name !== "application/json")) {
    card.append(folded("Form", fieldTable(resolve(document_, schema))));
  }
  for (const schema of schemasOf(document_, operation.requestBody?.content)) {
    card.append(folded(`Body: ${schema.name ?? "object"}`, fieldTable(schema)));
  }
  for (const schema of schemasOf(document_, operation.responses["200"]?.content)) {
    card.append(folded(`Answer: ${schema.name ?? typeText(schema)}`, fieldTable(schema)));
  }
  const errors = element("ul");
  for (const [status, answer] of Object.entries(operation.responses)) {
    if (status === "200") continue;
    const known = answer.$ref ? document_.components.responses[answer.$ref.split("/").pop()] : answer;
    errors.append(element("li", {}, element("b", {}, status), ` ${known.description}`));
  }
  card.append(folded("Errors", errors));
  return card;
}

function show(document_) {
  const contents = document.getElementById("contents");
  const operations = document.getElementById("operations");
  operations.replaceChildren();
  document.getElementById("version").textContent = document_.info.version;
  for (const { name } of document_.tags) {
    const links = element("ul");
    for (const [path, methods] of Object.entries(document_.paths)) {
      for (const method of METHODS.filter((one) => methods[one]?.tags[0] === name)) {
        const operation = methods[method];
        links.append(element("li", {}, element("a", { href: `#${operation.operationId}` },
          `${method.toUpperCase()} ${path}`)));
        operations.append(operationCard(document_, path, method, operation));
      }
    }
    contents.append(element("h3", {}, name), links);
  }
  const names = Object.keys(document_.components.schemas).sort();
  operations.append(element("section", { class: "card", id: "types" }, element("h2", {}, "Types"),
    ...names.map((name) => folded(name, element("p", { class: "quiet" },
      document_.components.schemas[name].description ?? ""),
    fieldTable(document_.components.schemas[name])))));
}

if (typeof document !== "undefined") {
  fetch("openapi.json").then((answer) => answer.json()).then(show, (error) => {
    document.getElementById("operations").textContent = `openapi.json cannot be read: ${error}`;
  });
}
