// The frame.
const views = {
  modules: ["Modules", modules.size - 1, null],
  ...(data.pipeline ? { schedule: ["Schedule", data.pipeline.microbatches, null] } : {}),
  collectives: ["Collectives", data.collectives.length, collectivesView],
  parameters: ["Parameters and inputs", data.inputs.length, parametersView],
  passes: ["Passes", data.passes, passesView],
};
function view(name) {
  $("summary").hidden = name === "passes" || name === "schedule";
  for (const [other, [, , make]] of Object.entries(views)) {
    const section = $(other);
    section.hidden = other !== name;
    section.role = "tabpanel";
    section.setAttribute("aria-labelledby", `tab-${other}`);
    if (other === name && make && !section.firstChild) section.append(...make());
    $(`tab-${other}`).ariaSelected = String(other === name);
    $(`tab-${other}`).tabIndex = other === name ? 0 : -1;
  }
  dispatchEvent(new Event("resize")); // what draws by its width has one now
}
for (const [name, [label, count]] of Object.entries(views)) {
  const button = el("button", "", label, el("small", "", count.toLocaleString("en")));
  button.id = `tab-${name}`;
  button.role = "tab";
  button.setAttribute("aria-controls", name);
  button.addEventListener("click", () => view(name));
  $("tabs").append(button);
}
$("tabs").addEventListener("keydown", (event) => { // as tabs are: the arrows go from one to the next
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key], all = [...$("tabs").children];
  if (!move) return;
  event.stopPropagation();
  const next = all[(all.indexOf(document.activeElement) + move + all.length) % all.length];
  next.focus();
  next.click();
});
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
  card("ranks", data.ranks.toLocaleString("en"), data.pipeline ? "one program for each place on pp" : "one program for all of them"),
  card("parameters", short(sum(parameters.map((row) => row.shape.reduce((a, b) => a * b, 1)))), `${many(parameters.length, "tensor")}, ${human(sum(parameters.map((row) => row.whole)))}`),
  card("a step", many(data.nodes.length, "value"), many(sum(data.collectives.map((row) => row.times)), "collective")),
  split(data.pipeline ? "in the collectives of a step, of all stages" : "in the collectives of a step, on each rank", [...axes].map(([name, { color }]) => ({ name, color, bytes: sum(data.collectives.filter((row) => row.axis === name).map((row) => row.bytes)) }))),
  split(data.pipeline ? `held by the fullest ranks (pp=${data.fullest})` : "held by each rank", Object.entries(data.memory).map(([name, bytes]) => ({ name, bytes, color: shades[name] }))),
);
function short(n) { for (const unit of ["", " K", " M", " B"]) { if (n < 1000 || unit === " B") return Number(n.toPrecision(3)) + unit; n /= 1000; } }
if (data.pipeline) {
  const bar = el("div", "stages", el("span", "", `${data.pipeline.schedule}, ${data.pipeline.parts}`));
  [null, ...data.pipeline.rows.keys()].forEach((stage) => {
    const one = data.pipeline.rows[stage];
    const button = el("button", "", stage === null ? "all stages" : stageChip([stage]), one ? el("small", "", `pp=${one.rank} · keeps ${one.held} × ${human(one.saved)}`) : null);
    button.dataset.stage = stage;
    button.ariaPressed = String(stage === null);
    button.addEventListener("click", () => { view("modules"); choose(stage); });
    bar.append(button);
  });
  $("summary").append(bar);
}
if (data.notes.length) $("summary").append(el("div", "notes", ...data.notes.slice(0, 8).map((note) => el("div", "", note))));
$("tree").append(row(root, 0));
toggle(root, rows.get(root), 0);
select(root);
view("modules");
document.documentElement.dataset.ready = Math.round(performance.now());
