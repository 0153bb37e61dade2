// The tree: modules, and in each its own values by phase.
const modules = new Map();
function moduleOf(path) {
  if (modules.has(path)) return modules.get(path);
  const parent = path === "" ? null : moduleOf(path.includes(".") ? path.slice(0, path.lastIndexOf(".")) : "");
  const made = { path, parent, kids: [], own: [], back: [], moved: new Map(), held: 0, count: 0, parameters: 0, first: Infinity, stages: new Set() };
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
    if (data.nodes[i][STAGE] >= 0) one.stages.add(data.nodes[i][STAGE]);
    if (!input && !backward) one.first = Math.min(one.first, i);
    if (isParameter) { one.held += input.bytes; one.parameters++; }
    if (moved) one.moved.set(moved.axis, (one.moved.get(moved.axis) || 0) + moved.bytes);
  }
});
const root = moduleOf("");
const inOrder = (moved) => [...axes.keys()].filter((axis) => moved.has(axis)).map((axis) => [axis, moved.get(axis)]);
for (const one of modules.values()) one.moved = inOrder(one.moved);
const total = (one) => sum(one.moved.map(([, bytes]) => bytes));
for (const one of modules.values()) one.most = Math.max(1, ...one.kids.map(total)); // what the bars of its children are drawn against
// What a folder shows, in the order of the program: parameters, then modules and values as they run, then the backward pass.
let chosen = null; // the stage that is shown, if it is one
const isShown = (item) => item.fold ? item.nodes.some(isShown) : chosen === null || (typeof item === "number" ? data.nodes[item][STAGE] === chosen : item.stages.has(chosen));
function contents(folder) {
  if (folder.nodes) return folder.nodes.filter(isShown);
  const items = [...folder.own, ...foldsOf(folder)].filter(isShown);
  const rank = (item) => (typeof item !== "number" ? item.first : inputAt.has(item) ? item - data.nodes.length : item);
  items.sort((a, b) => rank(a) - rank(b));
  if (folder.back.some(isShown)) items.push((folder.later ||= { nodes: folder.back, of: folder }));
  return items;
}
// Layers that are equal but for their number are one folder behind the first of them.
const FEWEST = 3; // that are worth a fold
const likeness = (one) => (one.likeness ||= JSON.stringify([one.count, one.parameters, one.held, one.moved, one.kids.map((kid) => [last(kid.path), likeness(kid)])]));
function foldsOf(folder) {
  if (folder.folds) return folder.folds;
  const made = [];
  for (let from = 0, to; from < folder.kids.length; from = to) {
    const one = folder.kids[from], alike = (other) => /^\d+$/.test(last(other.path)) && likeness(other) === likeness(one);
    for (to = from + 1; to < folder.kids.length && alike(one) && alike(folder.kids[to]);) to++;
    const others = folder.kids.slice(from + 1, to);
    made.push(one, ...(others.length + 1 < FEWEST ? others : [{ nodes: others, of: folder, fold: one, first: one.first + 0.5 }]));
  }
  return (folder.folds = made);
}
let selected = null;
const rows = new Map(); // item -> its row on the page
const itemOf = new WeakMap(); // and back
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
  const made = typeof item === "number" ? valueRow(item) : item.fold ? foldRow(item) : item.nodes ? phaseRow(item) : moduleRow(item);
  made.style.setProperty("--depth", depth);
  made.role = "treeitem";
  made.ariaLevel = String(depth + 1);
  if (typeof item !== "number") made.ariaExpanded = "false";
  made.addEventListener("click", () => {
    if (typeof item !== "number") toggle(item, made, depth);
    select(item);
  });
  if (item === selected) made.classList.add("on");
  rows.set(item, made);
  itemOf.set(made, item);
  return made;
}
function moduleRow(one) {
  const made = el("div", "row module", el("span", "caret", "▶"), el("span", "name", last(one.path) || "model"));
  made.append(el("span", "muted", many(one.count, "value") + (one.held ? ` · ${human(one.held)} of parameters` : "")));
  made.append(el("span", "push"));
  if (one.stages.size) made.append(stageChip(one.stages));
  for (const [axis, bytes] of one.moved) made.append(chip(axis, `${axis} ${human(bytes)}`));
  if (one !== root) made.append(bars(one.moved, one.parent.most));
  return made;
}
const foldRow = (one) =>
  el("div", "row phase", el("span", "caret", "▶"), el("span", "name", `${last(one.nodes[0].path)} … ${last(one.nodes.at(-1).path)}`), el("span", "muted", `${one.nodes.length} more like ${last(one.fold.path)}`));
const phaseRow = (one) =>
  el("div", "row phase", el("span", "caret", "▶"), el("span", "name", "backward"), el("span", "muted", many(one.nodes.length, "value")),
     el("span", "push"), ...axisChips(one.nodes));
function axisChips(nodes) {
  const moved = new Map();
  for (const one of nodes.map((i) => collectiveAt.get(i)).filter(Boolean)) moved.set(one.axis, (moved.get(one.axis) || 0) + one.bytes);
  return inOrder(moved).map(([axis, bytes]) => chip(axis, `${axis} ${human(bytes)}`));
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
  made.append(el("span", "push"), briefly(node), el("span", "muted source", word(i, SOURCE)));
  return made;
}
const shortCall = (call) => call.replace(/^(?:aten|autopar)\.(\w+)(?:\.\w+)?\(/, "$1(").replace(/^operator\./, "");
const open = new Map(); // folder -> {depth, limit, body}
function toggle(folder, made, depth) {
  if (open.has(folder)) {
    const { body } = open.get(folder);
    for (const [other, state] of open) if (body.contains(state.body)) open.delete(other);
    body.remove();
    made.classList.remove("open");
    made.ariaExpanded = "false";
  } else {
    const body = el("div");
    body.role = "group";
    made.after(body);
    made.classList.add("open");
    made.ariaExpanded = "true";
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
  const within = folder.kids && foldsOf(folder).find((one) => one.fold && one.nodes.includes(item));
  if (within) {
    show(folder, within);
    folder = within;
  }
  if (!open.has(folder)) toggle(folder, rows.get(folder), Number(rows.get(folder).style.getPropertyValue("--depth")));
  const place = contents(folder).indexOf(item);
  if (place >= open.get(folder).limit) fill(folder, place + CHUNK);
}
// The keys of a tree: up and down go from row to row, left and right fold and unfold.
function step(key) {
  const folder = typeof selected === "number" ? null : selected, shownRows = [...$("tree").querySelectorAll(".row")];
  const to = shownRows[shownRows.indexOf(rows.get(selected)) + { ArrowDown: 1, ArrowUp: -1 }[key]];
  if (to && !itemOf.has(to)) to.click();
  else if (to) select(itemOf.get(to));
  else if (folder && open.has(folder) === (key === "ArrowLeft")) toggle(folder, rows.get(folder), open.get(folder)?.depth ?? Number(rows.get(folder).style.getPropertyValue("--depth")));
  rows.get(selected).scrollIntoView({ block: "nearest" });
}
// Show one stage of a pipeline, or all.
function choose(stage) {
  chosen = stage;
  for (const button of document.querySelectorAll(".stages button")) button.ariaPressed = String(button.dataset.stage === String(stage));
  open.clear();
  rows.clear();
  $("tree").replaceChildren(row(root, 0));
  toggle(root, rows.get(root), 0);
}
// Open everything above an item, select it and bring it into view.
function reveal(item) {
  if (item === -1) return; // a value of one graph only, such as a bucket of gradients
  view("modules");
  if (!isShown(item)) choose(null);
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
