"use strict";
// The data are one rank's program (see page.py). Rows are made only when they are opened or scrolled to, and all text
// goes in as text, never as HTML: a name may hold anything.
const data = JSON.parse(document.getElementById("data").textContent);
const [NAME, TYPE, CALL, MODULE, SOURCE, PHASE, PASS, WHY, SHAPE, LAYOUT] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
const CHUNK = 200, HITS = 60, LINE = 20;
const $ = (id) => document.getElementById(id);
const word = (i, field) => data.words[data.nodes[i][field]];
const axes = new Map(data.mesh.map(([name, size], i) => [name, { size, color: `var(--axis-${i % 6})` }]));
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
const chip = (axis, text) => color(el("span", "chip", text), axis);
function human(bytes) {
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (bytes < 1000 || unit === "TB") return unit === "B" ? `${bytes} B` : `${Number(bytes.toPrecision(3))} ${unit}`;
    bytes /= 1000;
  }
}
const sum = (list) => list.reduce((total, one) => total + one, 0);
const many = (n, one) => `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;
const dims = (shape) => (shape.length ? shape.join(" × ") : "scalar");
const last = (path) => path.slice(path.lastIndexOf(".") + 1);

// A layout, its axes in their colours.
function layout(text) {
  const made = el("span", "layout");
  for (const part of text.split(/(\w+)/)) made.append(axes.has(part) ? color(el("span", "axis", part), part) : part);
  return made;
}
// `f32[4,32] of [8,64] [dp,tp]`: the type, and the layout in colours.
function typed(text) {
  if (text === "- ?") return el("span", "type", "no tensor");
  const place = text.startsWith("(") ? -1 : text.search(/ \[[^\]]*\](?: partial\([^)]*\))?$/);
  const made = el("span", "type", place < 0 ? layout(text) : text.slice(0, place + 1));
  if (place >= 0) made.append(layout(text.slice(place + 1)));
  return made;
}

// ---- the tree: modules, and in each its own values by phase -------------------------------------------------------
const modules = new Map();
function moduleOf(path) {
  if (modules.has(path)) return modules.get(path);
  const parent = path === "" ? null : moduleOf(path.includes(".") ? path.slice(0, path.lastIndexOf(".")) : "");
  const made = { path, parent, kids: [], own: [], back: [], moved: new Map(), held: 0, count: 0, parameters: 0, first: Infinity };
  modules.set(path, made);
  if (parent) parent.kids.push(made);
  return made;
}
const up = function* (module) { for (; module; module = module.parent) yield module; };
data.nodes.forEach((_, i) => {
  const module = moduleOf(word(i, MODULE)), backward = word(i, PHASE) === "backward";
  (backward ? module.back : module.own).push(i);
  const moved = collectiveAt.get(i), input = inputAt.get(i), isParameter = input && input.kind === "parameter";
  for (const one of up(module)) {
    one.count++;
    if (!input && !backward) one.first = Math.min(one.first, i);
    if (isParameter) { one.held += input.bytes; one.parameters++; }
    if (moved) one.moved.set(moved.axis, (one.moved.get(moved.axis) || 0) + moved.bytes);
  }
});
const root = moduleOf("");
const most = Math.max(1, ...root.kids.map((one) => sum([...one.moved.values()])));
// What a folder shows, in the order of the program: parameters, then modules and values as they run, then the backward pass.
function contents(folder) {
  if (folder.nodes) return folder.nodes;
  const items = [...folder.own, ...folder.kids];
  const rank = (item) => (typeof item !== "number" ? item.first : inputAt.has(item) ? item - data.nodes.length : item);
  items.sort((a, b) => rank(a) - rank(b));
  if (folder.back.length) items.push((folder.later ||= { nodes: folder.back, of: folder }));
  return items;
}
let selected = null;
const rows = new Map(); // item -> its row on the page
function bars(moved, whole) {
  const made = el("span", "bars");
  for (const [axis, bytes] of moved) {
    const bar = color(el("i"), axis);
    bar.style.width = `${(100 * bytes) / whole}%`;
    made.append(bar);
  }
  return made;
}
function row(item, depth) {
  const made = typeof item === "number" ? valueRow(item) : item.nodes ? phaseRow(item) : moduleRow(item);
  made.style.setProperty("--depth", depth);
  made.addEventListener("click", () => {
    if (typeof item !== "number") toggle(item, made, depth);
    if (!item.nodes) select(item);
  });
  if (item === selected) made.classList.add("on");
  rows.set(item, made);
  return made;
}
function moduleRow(one) {
  const made = el("div", "row module", el("span", "caret", "▶"), el("span", "name", last(one.path) || "model"));
  made.append(el("span", "muted", many(one.count, "value") + (one.held ? ` · ${human(one.held)} of parameters` : "")));
  made.append(el("span", "push"));
  for (const [axis, bytes] of one.moved) made.append(chip(axis, `${axis} ${human(bytes)}`));
  if (one !== root) made.append(bars(one.moved, Math.max(most, sum([...one.moved.values()]))));
  return made;
}
const phaseRow = (one) =>
  el("div", "row phase", el("span", "caret", "▶"), el("span", "name", "backward"), el("span", "muted", many(one.nodes.length, "value")),
     el("span", "push"), ...axisChips(one.nodes));
function axisChips(nodes) {
  const moved = new Map();
  for (const one of nodes.map((i) => collectiveAt.get(i)).filter(Boolean)) moved.set(one.axis, (moved.get(one.axis) || 0) + one.bytes);
  return [...moved].map(([axis, bytes]) => chip(axis, `${axis} ${human(bytes)}`));
}
function valueRow(i) {
  const node = data.nodes[i], moved = collectiveAt.get(i), input = inputAt.get(i);
  if (moved) {
    const made = color(el("div", "row node collective", el("span", "caret"), el("span", "name", `%${node[NAME]}`)), moved.axis);
    made.append(el("span", "op", moved.op.replaceAll("_", "-")), chip(moved.axis, `${moved.axis} ${human(moved.bytes)}`));
    made.append(el("span", "why", moved.reason), el("span", "muted source", moved.source));
    return made;
  }
  const isInput = input && input.kind !== "batch" && input.kind !== "seed";
  const made = el("div", `row node${isInput ? " parameter" : ""}`, el("span", "caret"));
  made.append(el("span", "name", isInput ? last(input.names[0]) : `%${node[NAME]}`));
  if (!isInput) made.append(el("span", "op", shortCall(node[CALL])));
  made.append(el("span", "push"), typed(node[TYPE]), el("span", "muted source", word(i, SOURCE)));
  return made;
}
const shortCall = (call) => call.replace(/^(aten|autopar)\./, "").replace(/^(\w+)\.\w+\(/, "$1(");
const open = new Map(); // folder -> {depth, limit, body}
function toggle(folder, made, depth) {
  if (open.has(folder)) {
    open.get(folder).body.remove();
    open.delete(folder);
    made.classList.remove("open");
  } else {
    const body = el("div");
    made.after(body);
    made.classList.add("open");
    open.set(folder, { depth, body, limit: 0 });
    fill(folder, CHUNK);
  }
}
function fill(folder, limit) {
  const state = open.get(folder), items = contents(folder);
  if (state.more) state.more.remove();
  const made = document.createDocumentFragment();
  for (const item of items.slice(state.limit, limit)) made.append(row(item, state.depth + 1));
  state.limit = limit;
  if (items.length > limit) {
    state.more = el("div", "row more", el("span", "caret"), `${items.length - limit} more`);
    state.more.style.setProperty("--depth", state.depth + 1);
    state.more.addEventListener("click", () => fill(folder, limit + CHUNK));
    made.append(state.more);
  }
  state.body.append(made);
}
function show(folder, item) {
  if (!open.has(folder)) toggle(folder, rows.get(folder), Number(rows.get(folder).style.getPropertyValue("--depth")));
  const place = contents(folder).indexOf(item);
  if (place >= open.get(folder).limit) fill(folder, place + CHUNK);
}
// Open everything above an item, select it and bring it into view.
function reveal(item) {
  view("modules");
  const module = typeof item === "number" ? moduleOf(word(item, MODULE)) : item.parent;
  const path = module ? [...up(module)].reverse() : [];
  path.forEach((folder, k) => show(folder, path[k + 1] || item));
  if (typeof item === "number" && word(item, PHASE) === "backward") {
    show(module, module.later);
    show(module.later, item);
  }
  select(item);
  rows.get(item).scrollIntoView({ block: "center" });
}

// ---- the panel of what is selected ---------------------------------------------------------------------------------
function select(item) {
  rows.get(selected)?.classList.remove("on");
  selected = item;
  rows.get(item)?.classList.add("on");
  $("detail").replaceChildren(...(typeof item === "number" ? valueDetail(item) : moduleDetail(item)));
  $("detail").scrollTop = 0;
}
function facts(pairs) {
  const made = el("dl");
  for (const [name, value] of pairs) if (value) made.append(el("dt", "", name), el("dd", "", value));
  return made;
}
function link(i, text) {
  const made = el("button", "link", text || `%${data.nodes[i][NAME]}`, el("small", "", shortCall(data.nodes[i][CALL])), layout(data.nodes[i][LAYOUT] || ""));
  made.addEventListener("click", () => reveal(i));
  return made;
}
function links(title, items, limit = 12) {
  if (!items.length) return [];
  const more = items.length > limit ? [el("div", "none", `and ${items.length - limit} more`)] : [];
  return [el("h4", "", title), ...items.slice(0, limit).map((i) => link(i)), ...more];
}
const operands = (i) => [...new Set((data.nodes[i][CALL].match(/%\w+/g) || []).map((name) => byName.get(name.slice(1))))].filter((j) => j !== undefined);
let userLists = null;
function users(i) {
  if (!userLists) {
    userLists = data.nodes.map(() => []);
    data.nodes.forEach((_, j) => operands(j).forEach((k) => userLists[k].push(j)));
  }
  return userLists[i];
}
function valueDetail(i) {
  const node = data.nodes[i], moved = collectiveAt.get(i), input = inputAt.get(i);
  const out = [el("h2", "", input ? input.names[0] : `%${node[NAME]}`)];
  const kind = input ? input.kind : moved ? "collective" : "value";
  out.push(el("div", "kind", [kind, word(i, PHASE), word(i, PASS) === "capture" ? "" : `made by ${word(i, PASS)}`].filter(Boolean).join(" · ")));
  if (moved) {
    const box = color(el("div", "why-box", el("b", "", `${moved.op.replaceAll("_", "-")} of ${human(moved.bytes)} over ${moved.axis}`), el("div", "", moved.reason)), moved.axis);
    out.push(box);
  } else if (node[WHY]) out.push(el("div", "why-box", node[WHY]));
  if (node[SHAPE] && node[LAYOUT]) out.push(tiles(node[SHAPE], node[LAYOUT]));
  out.push(facts([
    ["layout", node[LAYOUT] && layout(node[LAYOUT])], ["type", typed(node[TYPE])],
    ["shape", input && dims(input.shape)], ["on a rank", input && `${dims(input.local)}, ${human(input.bytes)} of ${human(input.whole)}`],
    ["also", input && input.names.slice(1).join(", ")], ["module", word(i, MODULE)], ["source", word(i, SOURCE)],
  ]));
  out.push(el("h4", "", "in the program"), el("pre", "", `%${node[NAME]} = ${node[CALL]}`));
  return out.concat(links("made from", operands(i)), links("used by", users(i)));
}
function moduleDetail(one) {
  const inside = (path) => one === root || path === one.path || path.startsWith(`${one.path}.`);
  const moved = data.collectives.filter((row) => inside(row.module));
  const held = data.inputs.filter((row) => row.kind === "parameter" && inside(row.names[0]));
  const out = [el("h2", "", one.path || "model"), el("div", "kind", `module · ${many(one.count, "value")} · ${many(one.kids.length, "submodule")}`)];
  out.push(facts([
    ["parameters", one.parameters ? `${one.parameters}, ${human(one.held)} on each rank` : ""],
    ["moves", moved.length ? `${human(sum(moved.map((row) => row.bytes)))} in ${many(moved.length, "collective")}` : "nothing"],
  ]));
  if (moved.length) {
    out.push(el("h4", "", "its collectives"));
    for (const row of moved.slice(0, 30)) {
      const made = el("button", "link", chip(row.axis, `${row.axis} ${human(row.bytes)}`), row.op.replaceAll("_", "-"), el("small", "", `${row.module} ${row.phase === "backward" ? "backward" : ""}`));
      made.title = row.reason;
      made.addEventListener("click", () => reveal(row.node));
      out.push(made);
    }
    if (moved.length > 30) out.push(el("div", "none", `and ${moved.length - 30} more`));
  }
  if (held.length) {
    out.push(el("h4", "", "its parameters"));
    for (const row of held.slice(0, 30)) out.push(link(row.node, one.path ? row.names[0].slice(one.path.length + 1) || row.names[0] : row.names[0]));
    if (held.length > 30) out.push(el("div", "none", `and ${held.length - 30} more`));
  }
  return out;
}
// A picture of how two dims of a value are cut, with the piece of rank 0 filled.
function tiles(shape, text) {
  const match = /^\[([^\]]*)\](?: partial\((.*)\))?$/.exec(text);
  const factors = match && match[1] ? match[1].split(",").map((part) => (part === "-" ? [] : part.split(":"))) : [];
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const add = (tag, attributes, content) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (content) made.textContent = content;
    svg.append(made);
  };
  if (!shape.length || factors.length !== shape.length) return svg;
  const order = shape.map((_, dim) => dim).sort((a, b) => factors[b].length - factors[a].length || shape[b] - shape[a]);
  const drawn = order.slice(0, 2).sort((a, b) => a - b);
  if (drawn.length === 1) drawn.push(null);
  const [y, x] = shape.length === 1 ? [null, drawn[0]] : drawn;
  const ratio = Math.min(2.2, Math.max(0.45, y === null ? 0.16 : shape[y] / shape[x]));
  const width = ratio > 1 ? Math.round(190 / ratio) + 60 : 250, height = y === null ? 40 : Math.min(190, Math.round(width * ratio));
  const left = 64, top = 8;
  const size = (factor) => (axes.has(factor) ? axes.get(factor).size : Number(factor));
  svg.setAttribute("class", "tiles");
  svg.setAttribute("width", 384);
  svg.setAttribute("height", height + 34);
  add("rect", { x: left, y: top, width, height, fill: "var(--soft)", stroke: "var(--line)", rx: 3 });
  // The blocks of rank 0: the first of each axis, every one of an integer factor.
  const first = (dim) => (dim === null ? [[0, 1]] : factors[dim].reduce((blocks, factor) => blocks.flatMap(([at, long]) =>
    axes.has(factor) ? [[at, long / size(factor)]] : Array.from({ length: size(factor) }, (_, k) => [at + (k * long) / size(factor), long / size(factor)])), [[0, 1]]));
  const colored = drawn.flatMap((dim) => (dim === null ? [] : factors[dim])).filter((factor) => axes.has(factor));
  const fill = colored.length ? axes.get(colored[0]).color : "var(--faint)";
  for (const [ay, ly] of first(y)) for (const [ax, lx] of first(x))
    add("rect", { x: left + ax * width, y: top + ay * height, width: lx * width, height: ly * height, fill, opacity: colored.length ? 0.38 : 0.18 });
  const cut = (dim, along) => {
    let pieces = 1;
    for (const factor of dim === null ? [] : factors[dim]) {
      const stroke = axes.has(factor) ? axes.get(factor).color : "var(--faint)", n = pieces * size(factor);
      for (let k = 1; k < n && n <= 64; k++) {
        if (k % (n / pieces) === 0) continue;
        const at = k / n;
        add("line", { ...(along === "x" ? { x1: left + at * width, x2: left + at * width, y1: top, y2: top + height } : { x1: left, x2: left + width, y1: top + at * height, y2: top + at * height }), stroke, "stroke-width": 1.3 });
      }
      pieces = n;
    }
  };
  cut(y, "y");
  cut(x, "x");
  if (y !== null) add("text", { x: left - 8, y: top + height / 2 + 4, "text-anchor": "end" }, String(shape[y]));
  add("text", { x: left + width / 2, y: top + height + 15, "text-anchor": "middle" }, `${shape[x]}${shape.length > 2 ? `   (dims ${y} and ${x} of ${dims(shape)})` : ""}`);
  return svg;
}

// ---- collectives and parameters: tables ----------------------------------------------------------------------------
function table(columns, items, target) {
  const made = el("table"), head = el("tr"), body = el("tbody");
  let sorted = null, way = 1;
  const render = () => body.replaceChildren(...items.map((item) => {
    const line = el("tr", "", ...columns.map(({ cell, number, wide }) => el("td", number ? "number" : wide ? "wide" : "", cell(item))));
    line.addEventListener("click", () => reveal(target(item)));
    return line;
  }));
  for (const column of columns) {
    const cell = el("th", column.number ? "number" : "", column.name);
    cell.addEventListener("click", () => {
      way = sorted === column ? -way : column.number ? -1 : 1;
      sorted = column;
      items.sort((a, b) => way * (column.number ? column.key(a) - column.key(b) : String(column.key(a)).localeCompare(String(column.key(b)), "en", { numeric: true })));
      for (const other of head.children) delete other.dataset.way;
      cell.dataset.way = way;
      render();
    });
    head.append(cell);
  }
  made.append(el("thead", "", head), body);
  render();
  return el("div", "box", made);
}
function meter(part, axis) {
  const bar = el("i");
  bar.style.width = `${100 * part}%`;
  return color(el("span", "meter", bar), axis);
}
const mono = (text) => el("span", "mono", text);
function collectivesView() {
  const totals = new Map();
  for (const row of data.collectives) {
    const key = `${row.axis} ${row.phase}`, known = totals.get(key) || { axis: row.axis, phase: row.phase, bytes: 0, count: 0 };
    known.bytes += row.bytes;
    known.count++;
    totals.set(key, known);
  }
  const cards = [...totals.values()].map((one) =>
    el("div", "card", el("h3", "", chip(one.axis, one.axis), ` ${one.phase}`), el("div", "big", human(one.bytes)), el("p", "", many(one.count, "collective"))));
  const largest = Math.max(1, ...data.collectives.map((row) => row.bytes));
  const columns = [
    { name: "op", key: (row) => row.op, cell: (row) => mono(row.op.replaceAll("_", "-")) },
    { name: "axis", key: (row) => row.axis, cell: (row) => chip(row.axis, row.axis) },
    { name: "bytes", number: true, key: (row) => row.bytes, cell: (row) => el("span", "", human(row.bytes), meter(row.bytes / largest, row.axis)) },
    { name: "shape", key: (row) => row.shape.join(), cell: (row) => mono(`${row.dtype} ${dims(row.shape)}`) },
    { name: "phase", key: (row) => row.phase, cell: (row) => row.phase },
    { name: "value", key: (row) => row.value, cell: (row) => mono(`%${row.value}`) },
    { name: "module", key: (row) => row.module, cell: (row) => mono(row.module) },
    { name: "source", key: (row) => row.source, cell: (row) => mono(row.source) },
    { name: "reason", wide: true, key: (row) => row.reason, cell: (row) => row.reason },
  ];
  return [el("div", "totals", ...cards), table(columns, [...data.collectives], (row) => row.node)];
}
function parametersView() {
  const largest = Math.max(1, ...data.inputs.map((row) => row.bytes));
  const columns = [
    { name: "name", key: (row) => row.names[0], cell: (row) => mono(row.names.join(" = ")) },
    { name: "kind", key: (row) => row.kind, cell: (row) => row.kind },
    { name: "dtype", key: (row) => row.dtype, cell: (row) => mono(row.dtype) },
    { name: "shape", key: (row) => row.whole, cell: (row) => mono(dims(row.shape)) },
    { name: "layout", key: (row) => row.layout, cell: (row) => layout(row.layout) },
    { name: "on a rank", key: (row) => row.bytes, cell: (row) => mono(dims(row.local)) },
    { name: "bytes on a rank", number: true, key: (row) => row.bytes, cell: (row) => el("span", "", human(row.bytes), meter(row.bytes / largest, (row.layout.match(/\w+/g) || []).find((part) => axes.has(part)))) },
    { name: "of", number: true, key: (row) => row.whole, cell: (row) => human(row.whole) },
  ];
  return [table(columns, [...data.inputs], (row) => row.node)];
}

// ---- what each pass changed ----------------------------------------------------------------------------------------
function kinds(lines) {
  let plus = 0, minus = 0, changed = 0;
  lines.forEach((line, k) => {
    if (pairOf(lines, k) === k + 1) changed++;
    else if (line.startsWith("+ ") && pairOf(lines, k) === null) plus++;
    else if (line.startsWith("- ") && pairOf(lines, k) === null) minus++;
  });
  return { plus, minus, changed };
}
// The line that a removed line became, or the one that an added line was.
function pairOf(lines, k) {
  const subject = (line) => (line || "").slice(2).match(/^(%\w+:|return \S+ "[^"]*"|\w+ program)/)?.[0];
  const same = (a, b) => lines[a]?.startsWith("- ") && lines[b]?.startsWith("+ ") && subject(lines[a]) && (subject(lines[a]) === subject(lines[b]) || lines[a].includes(" program"));
  return same(k, k + 1) ? k + 1 : same(k - 1, k) ? k - 1 : null;
}
function diffLine(lines, k) {
  const line = lines[k], other = pairOf(lines, k);
  const made = el("div", `line ${line.startsWith("+ ") ? "add" : line.startsWith("- ") ? "cut" : line === "..." ? "gap" : ""}`);
  if (other === null) return made.append(line), made;
  const there = lines[other];
  let start = 2, end = 0;
  while (start < line.length && line[start] === there[start]) start++;
  while (end < Math.min(line.length, there.length) - start && line.at(-1 - end) === there.at(-1 - end)) end++;
  made.append(line.slice(0, start), el("b", "", line.slice(start, line.length - end)), line.slice(line.length - end));
  return made;
}
function passesView() {
  if (!data.passes.length) return [el("div", "card", "A saved program holds the last pass only: inspect its TARGET to see what each pass did.")];
  const box = el("div", "box"), space = el("div"), steps = el("div", "steps"), filter = el("input");
  box.id = "diff";
  filter.type = "search";
  filter.placeholder = "Only lines that hold …";
  let lines = [], shown = [];
  const draw = () => {
    const from = Math.max(0, Math.floor(box.scrollTop / LINE) - 20), to = Math.min(shown.length, from + Math.ceil(box.clientHeight / LINE) + 40);
    space.replaceChildren(...shown.slice(from, to).map((k, i) => {
      const made = diffLine(lines, k);
      made.style.top = `${(from + i) * LINE}px`;
      return made;
    }));
  };
  const narrow = () => {
    const text = filter.value.toLowerCase();
    shown = lines.map((_, k) => k).filter((k) => !text || lines[k].toLowerCase().includes(text));
    space.style.height = `${shown.length * LINE}px`;
    box.scrollTop = 0;
    draw();
  };
  data.passes.forEach((pass) => {
    const { plus, minus, changed } = kinds(pass.lines);
    const button = el("button", "", el("b", "", pass.name), el("small", "", el("span", "plus", `+${plus}`), " ", el("span", "minus", `−${minus}`), ` ~${changed} lines · ${pass.level}`));
    button.addEventListener("click", () => {
      for (const other of steps.querySelectorAll("button")) other.ariaPressed = String(other === button);
      lines = pass.lines.length ? pass.lines : ["  this pass changed nothing"];
      narrow();
    });
    steps.append(button);
  });
  steps.append(filter);
  filter.addEventListener("input", narrow);
  box.addEventListener("scroll", draw);
  box.append(space);
  queueMicrotask(() => steps.querySelector("button").click());
  return [steps, box];
}

// ---- search --------------------------------------------------------------------------------------------------------
const names = [
  ...[...modules.values()].filter((one) => one.path).map((one) => ({ kind: "module", text: one.path, item: one })),
  ...data.inputs.flatMap((row) => row.names.map((name) => ({ kind: row.kind, text: name, item: row.node, layout: row.layout }))),
  ...data.nodes.map((node, i) => ({ kind: collectiveAt.has(i) ? "collective" : "value", text: `%${node[NAME]}`, item: i, layout: node[LAYOUT], more: word(i, SOURCE) })),
];
for (const one of names) one.low = one.text.toLowerCase();
let hits = [], at = 0;
function find() {
  const text = $("search").value.trim().toLowerCase();
  $("found").hidden = !text;
  if (!text) return;
  const score = (one) => {
    const place = one.low.indexOf(text);
    if (place >= 0) return (one.low === text || one.low === `%${text}` ? 0 : 1) + (place > 1 ? 1 : 0) + one.low.length / 1000;
    return one.more && one.more.toLowerCase().includes(text) ? 4 : null;
  };
  hits = names.map((one) => [score(one), one]).filter(([points]) => points !== null).sort((a, b) => a[0] - b[0]).map((pair) => pair[1]);
  at = 0;
  const shown = hits.slice(0, HITS).map((one, k) => {
    const place = one.low.indexOf(text), name = el("span", "mono");
    if (place < 0) name.append(one.text);
    else name.append(one.text.slice(0, place), el("mark", "", one.text.slice(place, place + text.length)), one.text.slice(place + text.length));
    const made = el("button", `hit${k ? "" : " on"}`, el("small", "", one.kind), name, place < 0 ? el("small", "", one.more) : "", layout(one.layout || ""));
    made.addEventListener("click", () => go(one));
    return made;
  });
  const rest = hits.length > HITS ? [el("div", "none", `and ${hits.length - HITS} more`)] : hits.length ? [] : [el("div", "none", "nothing has this name")];
  $("found").replaceChildren(...shown, ...rest);
}
function go(one) {
  $("found").hidden = true;
  $("search").blur();
  reveal(one.item);
}
$("search").addEventListener("input", find);
$("search").addEventListener("focus", find);
$("search").addEventListener("keydown", (event) => {
  const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const shown = $("found").querySelectorAll(".hit");
  if (move && shown.length) {
    event.preventDefault();
    shown[at].classList.remove("on");
    at = (at + move + shown.length) % shown.length;
    shown[at].classList.add("on");
    shown[at].scrollIntoView({ block: "nearest" });
  } else if (event.key === "Enter" && hits[at]) go(hits[at]);
  else if (event.key === "Escape") $("found").hidden = true;
});
document.addEventListener("click", (event) => { if (!event.target.closest(".search")) $("found").hidden = true; });
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement.tagName !== "INPUT") { event.preventDefault(); $("search").focus(); }
});

// ---- the frame -----------------------------------------------------------------------------------------------------
const views = {
  modules: ["Modules", modules.size - 1, null],
  collectives: ["Collectives", data.collectives.length, collectivesView],
  parameters: ["Parameters and inputs", data.inputs.length, parametersView],
  passes: ["Passes", data.passes.length, passesView],
};
function view(name) {
  for (const [other, [, , make]] of Object.entries(views)) {
    const section = $(other);
    section.hidden = other !== name;
    if (other === name && make && !section.firstChild) section.append(...make());
    $(`tab-${other}`).ariaSelected = String(other === name);
  }
}
for (const [name, [label, count]] of Object.entries(views)) {
  const button = el("button", "", label, el("small", "", count.toLocaleString("en")));
  button.id = `tab-${name}`;
  button.role = "tab";
  button.addEventListener("click", () => view(name));
  $("tabs").append(button);
}
$("title").textContent = data.title;
for (const [axis, size] of data.mesh) $("axes").append(chip(axis, `${axis} = ${size}`));
function card(title, big, small, ...more) { return el("div", "card", el("h3", "", title), el("div", "big", big), small ? el("p", "", small) : null, ...more); }
function split(title, parts) {
  const whole = sum(parts.map((part) => part.bytes)), stack = el("div", "stack"), legend = el("div", "legend");
  for (const part of parts) {
    if (!part.bytes) continue;
    const bar = el("i"), dot = el("i");
    bar.style.cssText = `width: ${(100 * part.bytes) / whole}%; background: ${part.color}`;
    dot.style.background = part.color;
    stack.append(bar);
    legend.append(el("span", "", dot, `${part.name} `, el("b", "", human(part.bytes))));
  }
  return card(title, human(whole), "", stack, legend);
}
const shades = { parameters: "var(--axis-3)", gradients: "var(--axis-4)", buffers: "var(--axis-5)", activations: "var(--axis-2)" };
const parameters = data.inputs.filter((row) => row.kind === "parameter");
$("summary").append(
  card("ranks", data.ranks.toLocaleString("en"), "one program for all of them"),
  card("parameters", short(sum(parameters.map((row) => row.shape.reduce((a, b) => a * b, 1)))), `${many(parameters.length, "tensor")}, ${human(sum(parameters.map((row) => row.whole)))}`),
  card("a step", many(data.nodes.length, "value"), many(data.collectives.length, "collective")),
  split("moved a step, by each rank", [...axes].map(([name, { color }]) => ({ name, color, bytes: sum(data.collectives.filter((row) => row.axis === name).map((row) => row.bytes)) }))),
  split("held by each rank", Object.entries(data.memory).map(([name, bytes]) => ({ name, bytes, color: shades[name] }))),
);
function short(n) { for (const unit of ["", " K", " M", " B"]) { if (n < 1000 || unit === " B") return Number(n.toPrecision(3)) + unit; n /= 1000; } }
if (data.notes.length) $("summary").append(el("div", "notes", ...data.notes.slice(0, 8).map((note) => el("div", "", note))));
$("tree").append(row(root, 0));
toggle(root, rows.get(root), 0);
select(root);
view("modules");
document.documentElement.dataset.ready = Math.round(performance.now());
