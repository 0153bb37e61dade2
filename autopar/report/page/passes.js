// What each pass changed: four fifths of all that is packed, and read when it is asked for.
function passesView() {
  if (!data.passes) return [el("div", "card", "A saved program holds the last pass only: inspect its TARGET to see what each pass did.")];
  const place = el("div");
  unpack("diffs").then((passes) => {
    place.replaceWith(...diffsOf(passes));
    $("passes").querySelectorAll(".steps button")[Math.max(0, passes.findIndex((pass) => pass.lines.length))].click();
  });
  return [place];
}
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
function diffsOf(passes) {
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
  passes.forEach((pass) => {
    const { plus, minus, changed } = kinds(pass.lines);
    const button = el("button", "", el("b", "", pass.name), el("small", "", el("span", "plus", `+${plus}`), " ", el("span", "minus", `−${minus}`), ` ~${changed} lines · ${pass.level}`));
    button.addEventListener("click", () => {
      for (const other of steps.querySelectorAll("button")) other.ariaPressed = String(other === button);
      lines = pass.lines.length ? pass.lines : ["  this pass changed nothing"];
      button.scrollIntoView({ block: "nearest" });
      narrow();
    });
    steps.append(button);
  });
  steps.append(filter);
  filter.addEventListener("input", narrow);
  box.addEventListener("scroll", draw);
  box.append(space);
  return [steps, box];
}
