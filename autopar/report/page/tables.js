// Collectives and parameters: tables.
// Rows that are equal but for numbers in their names are one row, which unfolds to all of them.
const unnumbered = (text) => String(text).replace(/\d+/g, "*");
function foldedRows(columns, items) {
  const groups = new Map();
  for (const item of items) {
    const key = JSON.stringify(columns.map((column) => (column.named ? unnumbered(column.key(item)) : column.key(item))));
    groups.has(key) ? groups.get(key).push(item) : groups.set(key, [item]);
  }
  return [...groups.values()].flatMap((group) => (group.length < FEWEST ? group.map((item) => [item]) : [group]));
}
function pressed(element, act) { // as a button is: with the mouse, Enter and the space bar
  element.tabIndex = 0;
  element.addEventListener("click", act);
  element.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); } });
}
function table(columns, items, target) {
  const made = el("table"), head = el("tr"), body = el("tbody"), groups = foldedRows(columns, items);
  let sorted = null, way = 1;
  const lineOf = (item, group) => {
    const cells = columns.map(({ cell, named, key, number, wide }) => {
      const many = group && named;
      return el("td", number ? "number" : wide ? "wide" : "", many ? mono(unnumbered(key(item))) : cell(item));
    });
    if (group) cells[0].prepend(el("span", "times", `${group.length} ×`));
    return el("tr", group ? "folded" : "", ...cells);
  };
  const single = (item) => {
    const line = lineOf(item, null);
    pressed(line, () => reveal(target(item)));
    return line;
  };
  const render = () => body.replaceChildren(...groups.map((group) => {
    if (group.length === 1) return single(group[0]);
    const line = lineOf(group[0], group);
    let inside = null;
    line.ariaExpanded = "false";
    pressed(line, () => {
      if (inside) inside.forEach((one) => one.remove());
      else line.after(...(inside = group.map(single)));
      line.ariaExpanded = String(inside !== null && inside[0].isConnected);
      if (line.ariaExpanded === "false") inside = null;
    });
    return line;
  }));
  for (const column of columns) {
    const cell = el("th", column.number ? "number" : "", column.name);
    cell.scope = "col";
    pressed(cell, () => {
      way = sorted === column ? -way : column.number ? -1 : 1;
      sorted = column;
      groups.sort(([a], [b]) => way * (column.number ? column.key(a) - column.key(b) : String(column.key(a)).localeCompare(String(column.key(b)), "en", { numeric: true })));
      for (const other of head.children) { delete other.dataset.way; other.ariaSort = "none"; }
      cell.dataset.way = way;
      cell.ariaSort = way > 0 ? "ascending" : "descending";
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
    ...(data.pipeline ? [
      { name: "graph", key: (row) => row.graph, cell: (row) => mono(row.graph) },
      { name: "pp", number: true, key: (row) => row.place, cell: (row) => String(row.place) },
      { name: "times", number: true, key: (row) => row.times, cell: (row) => `${row.times}x` },
    ] : []),
    { name: "bytes", number: true, key: (row) => row.bytes, cell: (row) => el("span", "", human(row.bytes), meter(row.bytes / largest, row.axis)) },
    { name: "shape", key: (row) => row.shape.join(), cell: (row) => mono(`${row.dtype} ${dims(row.shape)}`) },
    { name: "phase", key: (row) => row.phase, cell: (row) => row.phase },
    { name: "value", named: true, key: (row) => row.value, cell: (row) => mono(`%${row.value}`) },
    { name: "module", named: true, key: (row) => row.module, cell: (row) => mono(row.module) },
    { name: "source", key: (row) => row.source, cell: (row) => mono(row.source) },
    { name: "reason", named: true, wide: true, key: (row) => row.reason, cell: (row) => layout(row.reason, "reason") },
  ];
  return [el("div", "totals", ...cards), table(columns, [...data.collectives], (row) => row.node)];
}
function parametersView() {
  const largest = Math.max(1, ...data.inputs.map((row) => row.bytes));
  const columns = [
    { name: "name", named: true, key: (row) => row.names.join(" = "), cell: (row) => mono(row.names.join(" = ")) },
    { name: "kind", key: (row) => row.kind, cell: (row) => row.kind },
    ...(data.pipeline ? [{ name: "stage", key: (row) => data.nodes[row.node][STAGE], cell: (row) => (data.nodes[row.node][STAGE] < 0 ? "" : stageChip([data.nodes[row.node][STAGE]])) }] : []),
    { name: "dtype", key: (row) => row.dtype, cell: (row) => mono(row.dtype) },
    { name: "shape", key: (row) => row.whole, cell: (row) => mono(dims(row.shape)) },
    { name: "layout", key: (row) => row.layout, cell: (row) => layout(row.layout) },
    { name: "on a rank", key: (row) => row.bytes, cell: (row) => mono(dims(row.local)) },
    { name: "bytes on a rank", number: true, key: (row) => row.bytes, cell: (row) => el("span", "", human(row.bytes), meter(row.bytes / largest, (row.layout.match(/\w+/g) || []).find((part) => axes.has(part)))) },
    { name: "of", number: true, key: (row) => row.whole, cell: (row) => human(row.whole) },
  ];
  return [table(columns, [...data.inputs], (row) => row.node)];
}
