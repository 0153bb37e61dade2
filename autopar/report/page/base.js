// The data are one rank's program (see program_page.py). Rows are made only when they are opened or scrolled to, and all text
// goes in as text, never as HTML: a name may hold anything.
async function unpack(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (one) => one.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}
const data = await unpack("data");
data.nodes = (data.nodes[0] || []).map((_, i) => data.nodes.map((column) => column[i]));
const [NAME, TYPE, CALL, MODULE, SOURCE, PHASE, PASS, WHY, SHAPE, LAYOUT, STAGE] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
const CHUNK = 200, HITS = 60, LINE = 20;
const $ = (id) => document.getElementById(id);
const word = (i, field) => data.words[data.nodes[i][field]];
// An axis has the colour of its name on every page; one of the user's own gets what is left.
const NAMED = ["dp", "tp", "cp", "pp", "ep", "fsdp"], left = NAMED.map((_, i) => i).filter((i) => !data.mesh.some(([name]) => name === NAMED[i]));
const colorOf = (name, i) => (NAMED.includes(name) ? NAMED.indexOf(name) : left.length ? left[i % left.length] : i % 6);
const axes = new Map(data.mesh.map(([name, size], i) => [name, { size, color: `var(--axis-${colorOf(name, i)})` }]));
const byName = new Map(data.nodes.map((node, i) => [node[NAME], i]));
const collectiveAt = new Map(data.collectives.map((one) => [one.node, one]));
const inputAt = new Map(data.inputs.map((one) => [one.node, one]));

function el(tag, classes, ...children) {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
function color(element, axis) {
  element.style.setProperty("--c", axes.has(axis) ? axes.get(axis).color : "var(--dim)");
  return element;
}
// A stage of a pipeline, in a shade of its own.
function stageChip(stages) {
  const [first, last] = [Math.min(...stages), Math.max(...stages)], made = el("span", "stage", first === last ? `stage ${first}` : `stages ${first}-${last}`);
  made.style.setProperty("--s", `hsl(${(first * 137.5 + 210) % 360} 55% 50%)`);
  return made;
}
const chip = (axis, text) => color(el("span", "chip", text), axis);
function human(bytes) {
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (bytes < 1000 || unit === "TB") return unit === "B" ? `${bytes} B` : `${Number(bytes.toPrecision(3))} ${unit}`;
    bytes /= 1000;
  }
}
const sum = (list) => list.reduce((total, one) => total + one, 0);
const mono = (text) => el("span", "mono", text);
const many = (n, one) => `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;
const dims = (shape) => (shape.length ? shape.join(" × ") : "scalar");
const last = (path) => path.slice(path.lastIndexOf(".") + 1);

// A layout, its axes in their colours.
function layout(text, classes = "layout") {
  const made = el("span", classes);
  for (const part of text.split(/(\w+)/)) made.append(axes.has(part) ? color(el("span", "axis", part), part) : part);
  return made;
}
// A type in a row: one rank's shape and the layout; how many, if there are several.
function briefly(node) {
  const types = node[TYPE].match(/\w+\[[\d,]*\]/g) || [];
  if (types.length !== 1) return el("span", "type", types.length ? many(types.length, "result") : "no tensor");
  return el("span", "type", `${types[0]} `, layout(node[LAYOUT]));
}
// `f32[4,32] of [8,64] [dp,tp]`: the type, and the layout in colours.
function typed(text) {
  if (text === "- ?") return el("span", "type", "no tensor");
  const place = text.startsWith("(") ? -1 : text.search(/ \[[^\]]*\](?: partial\([^)]*\))?$/);
  const made = el("span", "type", place < 0 ? layout(text) : text.slice(0, place + 1));
  if (place >= 0) made.append(layout(text.slice(place + 1)));
  return made;
}
