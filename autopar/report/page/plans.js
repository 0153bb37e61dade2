// The table sorts by a click on a head, or by Enter there; a plan's row and its dot show each other, and a dot says at once what it is.
const UNITS = { us: 1, µs: 1, ms: 1e3, s: 1e6, min: 6e7, h: 3.6e9, B: 1, kB: 1e3, KB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, "%": 1, "": 1 };
const table = document.querySelector("table"), [head, ...rows] = table.querySelectorAll("tr"), tip = document.getElementById("tip");
function valueOf(row, column) {
  const text = row.children[column].textContent.trim(), [, number, unit] = /^([\d,]*\.?\d+)\s*(\S*)$/.exec(text) || [];
  return number !== undefined && unit in UNITS ? Number(number.replaceAll(",", "")) * UNITS[unit] : text;
}
const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
[...head.children].forEach((cell, column) => {
  cell.tabIndex = 0;
  cell.scope = "col";
  cell.ariaSort = "none";
  const sort = () => {
    const way = cell.ariaSort === "ascending" ? -1 : 1;
    for (const other of head.children) other.ariaSort = "none";
    cell.ariaSort = way > 0 ? "ascending" : "descending";
    rows.sort((a, b) => way * order(valueOf(a, column), valueOf(b, column)));
    rows.forEach((row) => row.parentNode.append(row));
  };
  cell.addEventListener("click", sort);
  cell.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); } });
});
function show(dot, row, place) {
  dot?.classList.add("lit");
  row?.classList.add("lit");
  if (!dot) return;
  tip.textContent = dot.querySelector("title").textContent;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(place.x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(4, place.y - box.height - 10)}px`;
}
function hide(dot, row) {
  dot?.classList.remove("lit");
  row?.classList.remove("lit");
  tip.hidden = true;
}
const middle = (element) => { const box = element.getBoundingClientRect(); return { x: box.left + box.width / 2, y: box.top }; };
const rowOf = new Map(rows.map((row) => [row.querySelector("a").getAttribute("href"), row]));
for (const dot of document.querySelectorAll(".pareto circle")) {
  const link = dot.closest("a"), row = link && rowOf.get(link.getAttribute("href"));
  dot.addEventListener("mousemove", (event) => show(dot, row, { x: event.clientX, y: event.clientY }));
  dot.addEventListener("mouseleave", () => hide(dot, row));
  link?.addEventListener("focus", () => show(dot, row, middle(dot)));
  link?.addEventListener("blur", () => hide(dot, row));
  row?.addEventListener("mouseenter", () => show(dot, row, middle(dot)));
  row?.addEventListener("mouseleave", () => hide(dot, row));
}
