"use strict";
// Zoom, a tip at the pointer, and one micro-batch followed through all ranks.
(() => {
  const root = document.querySelector(".timeline-page .t-lanes")?.parentElement;
  if (!root) return;
  const svg = root.querySelector("svg.timeline"), scroll = root.querySelector(".t-scroll"), tip = root.querySelector(".t-tip");
  const width = Number(svg.getAttribute("width"));
  const number = (one, name) => Number(one.getAttribute(name));
  const boxes = [...svg.querySelectorAll("rect.b, rect.msg, rect.wait")].map((one) => {
    const title = one.querySelector("title");
    if (title) { one.dataset.title = title.textContent; title.remove(); } // else the browser shows it a second time
    return { one, x: number(one, "x"), width: number(one, "width") };
  });
  const labels = [...svg.querySelectorAll("text.l")].map((one) => {
    const box = one.previousElementSibling;
    return { one, x: number(one, "x"), width: number(box, "width"), need: 6.2 * one.textContent.length + 2, shown: true };
  });
  const ticks = [...svg.querySelectorAll(".tick")].map((one) => ({ line: one.children[0], text: one.children[1], x: number(one.children[0], "x1") }));
  let zoom = 1;

  function draw(next, at) {
    const fit = Math.max(scroll.clientWidth, 300) / width;
    next = Math.min(Math.max(next, fit), 400);
    const time = (scroll.scrollLeft + at) / zoom; // what is under the pointer stays there
    zoom = next;
    for (const { one, x, width } of boxes) {
      one.setAttribute("x", x * zoom);
      one.setAttribute("width", Math.max(width * zoom, 0.3));
    }
    for (const label of labels) {
      const shown = label.width * zoom >= label.need;
      if (shown) label.one.setAttribute("x", label.x * zoom);
      if (shown !== label.shown) label.one.style.display = (label.shown = shown) ? "" : "none";
    }
    ticks.forEach(({ line, text, x }, i) => {
      line.setAttribute("x1", x * zoom);
      line.setAttribute("x2", x * zoom);
      text.setAttribute("x", Math.min(Math.max(x * zoom, i ? 0 : 14), width * zoom - 20));
    });
    svg.setAttribute("width", Math.ceil(width * zoom));
    scroll.scrollLeft = time * zoom - at;
  }

  root.querySelector(".t-zoom").addEventListener("click", (event) => {
    const factor = event.target.dataset.zoom;
    if (factor !== undefined) draw(Number(factor) ? zoom * factor : 0, scroll.clientWidth / 2);
  });
  scroll.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    draw(zoom * Math.exp(-event.deltaY / 300), event.clientX - scroll.getBoundingClientRect().left);
  }, { passive: false });

  svg.addEventListener("pointermove", (event) => {
    const title = event.target.dataset?.title;
    tip.hidden = !title;
    if (!title) return;
    tip.textContent = title;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + "px";
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });

  const followed = document.head.appendChild(document.createElement("style"));
  svg.addEventListener("click", (event) => {
    const found = [...event.target.classList].find((name) => /^m\d+$/.test(name));
    const rule = found ? `.timeline :is(.b, .msg, .l):not(.${found}) { opacity: 0.16 }` : "";
    followed.textContent = followed.textContent === rule ? "" : rule;
  });
  addEventListener("resize", () => draw(zoom, 0));
  draw(0, 0);
})();
