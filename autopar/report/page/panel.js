// The panel of what is selected.
function select(item) {
  const before = rows.get(selected), now = rows.get(item);
  if (before) { before.classList.remove("on"); before.ariaSelected = "false"; before.tabIndex = -1; }
  selected = item;
  if (now) { now.classList.add("on"); now.ariaSelected = "true"; now.tabIndex = 0; }
  $("detail").replaceChildren(...(typeof item === "number" ? valueDetail(item) : moduleDetail(item.of || item)));
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
    const box = color(el("div", "why-box", el("b", "", `${moved.op.replaceAll("_", "-")} of ${human(moved.bytes)} over ${moved.axis}`), layout(moved.reason, "reason")), moved.axis);
    out.push(box);
  } else if (node[WHY]) out.push(el("div", "why-box", node[WHY]));
  if (node[SHAPE] && node[LAYOUT]) out.push(tiles(node[SHAPE], node[LAYOUT]));
  out.push(facts([
    ["layout", node[LAYOUT] && layout(node[LAYOUT])], ["type", typed(node[TYPE])],
    ["shape", input && dims(input.shape)], ["on a rank", input && `${dims(input.local)}, ${human(input.bytes)} of ${human(input.whole)}`],
    ["stage", node[STAGE] >= 0 && `${node[STAGE]}, on pp=${data.pipeline.rows[node[STAGE]].rank}`],
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
    ["parameters", one.parameters ? `${one.parameters}, ${human(one.held)} on ${data.pipeline ? "the ranks of its stages" : "each rank"}` : ""],
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
