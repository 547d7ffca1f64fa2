// Draws the timeline of timeline.py on a canvas.
function stepsightTimeline(number, data) {
  const canvas = document.getElementById(`timeline-${number}`);
  const note = document.getElementById(`timeline-note-${number}`);
  if (!canvas) return;
  const context = canvas.getContext("2d"), row = data.lanes.length > 24 ? 15 : 20, left = 150, height = data.lanes.length * row + 26;
  const help = "Scroll or press + and - to zoom, drag or press the arrows to move, double-click to see all. " +
    "A line below an event: it is on the critical path.";
  let from = 0, to = data.end, drag = null;
  const css = name => getComputedStyle(canvas).getPropertyValue(name).trim();
  const seconds = t => t >= 1e6 ? (t / 1e6).toPrecision(4) + " s" : (t / 1e3).toPrecision(4) + " ms";
  const width = () => canvas.clientWidth - left, place = t => left + (t - from) / (to - from) * width();
  function draw() {
    canvas.style.height = height + "px";
    canvas.width = canvas.clientWidth * devicePixelRatio; canvas.height = height * devicePixelRatio;
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.font = `${row > 15 ? 12 : 10}px system-ui, sans-serif`;
    const ink = css("color"), colors = data.colors.map(at => css(at < 0 ? "--grey" : `--c${at}`));
    for (const [lane, begin, lasts, color, name, before, waits, critical] of data.events) {
      if (begin + lasts < from || begin > to) continue;
      const x = Math.max(place(begin), left), w = Math.max(Math.min(place(begin + lasts), left + width()) - x, 0.5);
      context.fillStyle = colors[color]; context.fillRect(x, lane * row + 2, w, row - 5);
      if (critical) { context.fillStyle = ink; context.fillRect(x, lane * row + row - 3, w, 2); }
      if (w > 26) { context.fillStyle = "#fff"; context.fillText(data.names[name], x + 3, lane * row + row - 5, w - 4); }
    }
    context.fillStyle = ink;
    data.lanes.forEach((lane, at) => context.fillText(lane, 2, at * row + row - 5, left - 8));
    for (let part = 0; part <= 8; part++) {
      const t = from + (to - from) * part / 8;
      context.fillText(seconds(t), Math.min(place(t), canvas.clientWidth - 60), height - 8);
    }
  }
  function show(begin, end) {
    const span = Math.min(Math.max(end - begin, 1e-3), data.end);
    from = Math.min(Math.max(0, begin), data.end - span); to = from + span; draw();
  }
  const zoom = (at, factor) => show(at - (at - from) * factor, at + (to - at) * factor);
  const time = event => from + (event.offsetX - left) / width() * (to - from);
  function hover(event) {
    if (drag !== null) {
      const move = (drag - event.offsetX) / width() * (to - from);
      drag = event.offsetX; return show(from + move, to + move);
    }
    const t = time(event), lane = Math.floor(event.offsetY / row);
    const found = data.events.find(e => e[0] === lane && e[1] <= t && t <= e[1] + e[2]);
    if (!found) { note.textContent = help; return; }
    const before = data.events[found[5]];
    const why = !before ? "" : `, for ${data.names[before[4]]} of ${data.lanes[before[0]]}`;
    note.textContent = `${data.names[found[4]]} of ${data.lanes[found[0]]}: ${seconds(found[2])}, from ` +
      `${seconds(found[1])}; waits ${seconds(found[6])}${why}${found[7] ? "; on the critical path" : ""}`;
  }
  canvas.onwheel = event => { event.preventDefault(); zoom(time(event), event.deltaY > 0 ? 1.25 : 0.8); };
  canvas.onmousemove = hover; canvas.onmousedown = event => drag = event.offsetX;
  canvas.onmouseup = canvas.onmouseleave = () => drag = null;
  canvas.ondblclick = () => show(0, data.end);
  canvas.onkeydown = event => {
    const step = (to - from) / 8, middle = (from + to) / 2;
    const moves = {"+": () => zoom(middle, 0.8), "-": () => zoom(middle, 1.25), 
      ArrowLeft: () => show(from - step, to - step), ArrowRight: () => show(from + step, to + step)};
    if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
  };
  new ResizeObserver(draw).observe(canvas.parentElement); note.textContent = help; draw();
}
