// Collectives and parameters: tables.
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
    { name: "value", key: (row) => row.value, cell: (row) => mono(`%${row.value}`) },
    { name: "module", key: (row) => row.module, cell: (row) => mono(row.module) },
    { name: "source", key: (row) => row.source, cell: (row) => mono(row.source) },
    { name: "reason", wide: true, key: (row) => row.reason, cell: (row) => layout(row.reason, "reason") },
  ];
  return [el("div", "totals", ...cards), table(columns, [...data.collectives], (row) => row.node)];
}
function parametersView() {
  const largest = Math.max(1, ...data.inputs.map((row) => row.bytes));
  const columns = [
    { name: "name", key: (row) => row.names[0], cell: (row) => mono(row.names.join(" = ")) },
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
