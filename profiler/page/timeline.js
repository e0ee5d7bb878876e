"use strict";
// Draws the lanes that stand in the page as JSON; times are nanoseconds.
(() => {
  const box = document.getElementById("timeline");
  if (!box) return;
  const data = JSON.parse(document.getElementById("lanes").textContent);
  const canvas = box.querySelector("canvas"), told = box.querySelector(".told"), where = box.querySelector(".where");
  const pen = canvas.getContext("2d");
  const AXIS = 22, LANE = 15, GAP = 7, HEAD = 17;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let colours, gutter, wide, tall, from = 0, to = data.span, asked = false, detail = false;

  for (const lane of data.lanes) {
    let at = 0;
    lane.start = lane.start.map((step) => (at += step));
    // The latest end so far: what a search for the first visible span needs, since lanes may overlap.
    let latest = 0;
    lane.latest = lane.start.map((start, i) => (latest = Math.max(latest, start + lane.dur[i])));
    lane.several = new Map(lane.count[0].map((place, i) => [place, lane.count[1][i]]));
  }
  const shown = () => data.lanes.filter((lane) => detail || !lane.detail);
  // Where each lane stands: a line above the lanes of a rank, a gap between threads and streams.
  function place() {
    let head = "", label = null;
    tall = AXIS;
    for (const lane of shown()) {
      lane.opens = lane.head !== "" && lane.head !== head;
      lane.first = lane.opens || lane.label !== label || lane.head !== head;
      if (lane.opens) tall += HEAD;
      else if (lane.first) tall += GAP / 2;
      lane.tall = lane.under && !lane.detail ? 1.4 * LANE : LANE;
      lane.y = tall;
      tall += lane.tall;
      head = lane.head;
      label = lane.label;
    }
    tall += GAP;
  }

  const time = (ns) => {
    for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["us", 1e3]])
      if (Math.abs(ns) >= size) return `${(ns / size).toPrecision(4)} ${unit}`;
    return `${ns} ns`;
  };
  const x = (ns) => gutter + ((ns - from) / (to - from)) * (wide - gutter);
  const ns = (px) => from + ((px - gutter) / (wide - gutter)) * (to - from);
  const read = () => {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(`--${name}`).trim();
    colours = { of: [0, 1, 2, 3, 4, 5, 6, 7].map((i) => value(`c${i}`)).concat(value("rest")) };
    for (const name of ["fg", "bg", "muted", "line", "panel"]) colours[name] = value(name);
  };
  const before = (values, limit) => {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < limit) low = middle + 1;
      else high = middle;
    }
    return low;
  };

  function axis() {
    const step = 10 ** Math.ceil(Math.log10((to - from) / 8));
    const size = (to - from) / step < 3 ? step / 4 : (to - from) / step < 6 ? step / 2 : step;
    pen.fillStyle = colours.panel;
    pen.fillRect(0, 0, wide, AXIS);
    pen.textAlign = "left";
    const room = 74 / ((wide - gutter) / ((to - from) / size));
    const stride = size * Math.max(1, Math.ceil(room));
    for (let at = Math.ceil(from / stride) * stride; at <= to; at += stride) {
      pen.fillStyle = colours.line;
      pen.fillRect(x(at), 0, 1, tall);
      pen.fillStyle = colours.muted;
      if (x(at) < wide - 50) pen.fillText(time(at), x(at) + 4, AXIS / 2);
    }
  }

  function draw() {
    asked = false;
    pen.clearRect(0, 0, wide, tall);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    axis();
    for (const lane of shown()) {
      if (lane.opens) {
        pen.fillStyle = colours.panel;
        pen.fillRect(0, lane.y - HEAD, wide, HEAD - 1);
        pen.fillStyle = colours.fg;
        pen.fillText(lane.head, 4, lane.y - HEAD / 2);
      }
      if (lane.first) {
        pen.fillStyle = colours.muted;
        pen.fillText(lane.label, 8, lane.y + lane.tall / 2, gutter - 12);
      }
      let drawn = -1;
      for (let i = before(lane.latest, from); i < lane.start.length && lane.start[i] <= to; i++) {
        const right = Math.min(x(lane.start[i] + lane.dur[i]), wide);
        let left = Math.max(x(lane.start[i]), gutter);
        const tiny = right - left < 1;
        if (right < gutter || (tiny && right <= drawn)) continue;
        // Beside each other, so that many short spans look as busy as they are.
        if (tiny && left < drawn) left = drawn;
        const size = Math.max(right - left, 1);
        drawn = left + size;
        const part = lane.filled ? lane.filled[i] / 9 : 1, room = size > 3 ? size - 0.6 : size;
        const own = lane.tall - 2;
        if (part < 1 && lane.under && lane.under[i] !== "-") {
          pen.fillStyle = colours.of[lane.under.charCodeAt(i) - 48];
          pen.fillRect(left, lane.y, room, own);
        }
        pen.fillStyle = colours.of[lane.colour.charCodeAt(i) - 48];
        pen.fillRect(left, lane.y, room, own * part);
        if (size > 46) {
          pen.save();
          pen.beginPath();
          pen.rect(left, lane.y, size - 3, lane.tall);
          pen.clip();
          pen.fillStyle = lane.colour[i] === "8" || part < (lane.under ? 0.5 : 0.85) ? colours.fg : colours.bg;
          pen.fillText(data.names[lane.name[i]], left + 3, lane.y + lane.tall / 2 - 0.5);
          pen.restore();
        }
      }
    }
    where.textContent = `${time(from)} to ${time(to)}`;
  }
  const later = () => {
    if (!asked) requestAnimationFrame(draw);
    asked = true;
  };
  function resize() {
    const scale = devicePixelRatio || 1;
    wide = canvas.clientWidth;
    gutter = wide < 600 ? 64 : 104;
    place();
    canvas.style.height = `${tall}px`;
    canvas.width = wide * scale;
    canvas.height = tall * scale;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    read();
    draw();
  }
  function show(a, b) {
    const size = Math.min(Math.max(b - a, 50), data.span);
    from = Math.min(Math.max(a, 0), data.span - size);
    to = from + size;
    later();
  }
  const zoom = (factor, at = (from + to) / 2) =>
    factor ? show(at - (at - from) * factor, at + (to - at) * factor) : show(0, data.span);

  function tell(event) {
    const place = canvas.getBoundingClientRect();
    const at = ns(event.clientX - place.left), y = event.clientY - place.top;
    const lane = shown().find((one) => y >= one.y && y < one.y + one.tall);
    if (!lane || event.clientX - place.left < gutter) return;
    const near = (2 * (to - from)) / (wide - gutter);
    for (let i = before(lane.start, at + near) - 1; i >= 0 && lane.latest[i] >= at - near; i--) {
      if (lane.start[i] + lane.dur[i] < at - near) continue;
      const many = lane.several.get(i), name = data.names[lane.name[i]];
      const what = many ? `${many} short spans, the longest ${name}` : name;
      const own = lane.filled && lane.filled[i] < 9 ? ` (${Math.round((100 * lane.filled[i]) / 9)} % of it)` : "";
      const whose = lane.head ? `${lane.head}, ${lane.label}` : lane.label;
      told.textContent = `${whose}, at ${time(lane.start[i])} for ${time(lane.dur[i])}: ${what}${own}`;
      return;
    }
  }

  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, from, to };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) return tell(event);
    const moved = ((event.clientX - held.x) / (wide - gutter)) * (held.to - held.from);
    show(held.from - moved, held.to - moved);
  });
  for (const kind of ["pointerup", "pointercancel"])
    canvas.addEventListener(kind, (event) => {
      if (held && Math.abs(event.clientX - held.x) < 3) tell(event);
      held = null;
    });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, ns(event.clientX - canvas.getBoundingClientRect().left)));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    zoom(Math.exp((event.deltaY || event.deltaX) / 300), ns(event.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });
  box.addEventListener("keydown", (event) => {
    const step = (to - from) / 5;
    const action = {
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => zoom(0),
      ArrowLeft: () => show(from - step, to - step), ArrowRight: () => show(from + step, to + step),
    }[event.key];
    if (action) { event.preventDefault(); action(); }
  });
  for (const button of box.querySelectorAll("[data-zoom]"))
    button.addEventListener("click", () => zoom(Number(button.dataset.zoom)));
  const toggle = box.querySelector("[data-detail]");
  toggle?.addEventListener("click", () => {
    detail = !detail;
    toggle.setAttribute("aria-pressed", detail);
    resize();
  });
  // In the next frame: what changes a size while sizes are told would be told again.
  new ResizeObserver(() => requestAnimationFrame(resize)).observe(box);
  dark.addEventListener("change", resize);
})();
