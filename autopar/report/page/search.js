// Search.
const names = [
  ...[...modules.values()].filter((one) => one.path).map((one) => ({ kind: "module", text: one.path, item: one })),
  ...data.inputs.flatMap((row) => row.names.map((name) => ({ kind: row.kind, text: name, item: row.node, layout: row.layout }))),
  ...data.nodes.map((node, i) => ({ kind: collectiveAt.has(i) ? "collective" : inputAt.get(i)?.kind || "value", text: `%${node[NAME]}`, item: i, layout: node[LAYOUT], more: word(i, SOURCE) })),
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
  if (event.key.startsWith("Arrow") && document.activeElement.tagName !== "INPUT" && !$("modules").hidden) { event.preventDefault(); step(event.key); }
});
