// --- charts: axes, bars, lines, tooltips; drawn anew at the width that there is ----------------

(() => {
  const { el, svg } = R;
  const tip = el("div", { class: "tip", "aria-hidden": "true" });
  tip.hidden = true;
  document.body.append(tip);

  function showTip(event, lines) {
    tip.replaceChildren(...lines.map((line, index) =>
      el("div", { class: index ? "tip-line" : "tip-head" }, line)));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
    const above = event.clientY - box.height - 12;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (above < 8 ? event.clientY + 16 : above) + "px";
  }
  const hideTip = () => { tip.hidden = true; };
  window.addEventListener("scroll", hideTip, { passive: true });

  // What has a tooltip says the same to those who cannot hover: charts have a table as well.
  R.hint = (node, lines) => {
    node.addEventListener("pointermove", (event) => showTip(event, lines()));
    node.addEventListener("pointerleave", hideTip);
    return node;
  };

  R.ticks = (low, high, wanted) => {
    const span = high - low;
    if (!(span > 0) || !Number.isFinite(span)) return [low];
    const rough = span / wanted;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= rough * 0.999) || 10 * power;
    const found = [];
    const first = Math.ceil(low / step - 1e-9);
    const last = Math.floor(high / step + 1e-9);
    for (let i = first; i <= last && found.length < 50; i++) found.push(i * step + 0);
    return found;
  };

  const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  R.timeTicks = (end, wanted) => {
    const step = TIMES.find((one) => one >= end / wanted);
    if (end <= wanted / 2 || !step) return R.ticks(0, end, wanted);
    return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, index) => index * step);
  };

  // A figure with a title, a note, a picture and the same as a table.
  // `refresh` draws it anew with what has changed of these.
  R.figure = (chart) => {
    const { title, label, wide, head, height = 220, body } = chart;
    const tableRows = () => chart.rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell))));
    const said = el("p", { class: "quiet" }, chart.note);
    const cells = head && el("tbody", {}, tableRows());
    const id = "f-" + title.toLowerCase().replace(/[^a-z]+/g, "-");
    const holder = el("div", { class: "plot" });
    const figure = el("figure", { class: wide ? "chart wide" : "chart", id },
      el("figcaption", {}, el("h3", {}, title), said),
      holder,
      head && el("details", { class: "as-table" }, el("summary", {}, "As a table"),
        el("div", { class: "scroll" },
          el("table", {},
            el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
            cells))));
    if (body) {
      holder.append(body);
      return figure;
    }
    let drawn = 0;
    const redraw = (width, anew) => {
      if (width < 40 || (width === drawn && !anew)) return;
      drawn = width;
      const picture = svg("svg", {
        width, height, viewBox: "0 0 " + width + " " + height, role: "img", "aria-label": label,
      });
      chart.draw(picture, width, height);
      holder.replaceChildren(picture);
    };
    new ResizeObserver((entries) => redraw(Math.floor(entries[0].contentRect.width))).observe(holder);
    figure.refresh = (more) => {
      Object.assign(chart, more);
      said.textContent = chart.note;
      if (cells) cells.replaceChildren(...tableRows());
      redraw(drawn, true);
    };
    return figure;
  };

  const MARGIN = { top: 14, right: 12, bottom: 36, left: 44 };

  // The frame of a plot: lines across, numbers at the side, a name below.
  // `above` is room for names of marks, which would hide bars below.
  R.frame = (picture, width, height, { top, ticks, tickText, name, right = MARGIN.right, above = 0 }) => {
    const inner = {
      left: MARGIN.left, right: width - right, top: MARGIN.top + above, bottom: height - MARGIN.bottom,
    };
    inner.width = inner.right - inner.left;
    inner.height = inner.bottom - inner.top;
    inner.y = (value) => inner.bottom - (value / top) * inner.height;
    for (const tick of ticks) {
      const y = Math.round(inner.y(tick)) + 0.5;
      picture.append(
        svg("line", { class: tick === 0 ? "axis" : "grid", x1: inner.left, x2: inner.right, y1: y, y2: y }),
        svg("text", { class: "tick", x: inner.left - 8, y: y + 4, "text-anchor": "end" }, tickText(tick)));
    }
    picture.append(svg("text", {
      class: "axis-name", x: inner.left + inner.width / 2, y: height - 4, "text-anchor": "middle",
    }, name));
    return inner;
  };

  R.xTick = (picture, inner, x, text, anchor = "middle") => picture.append(
    svg("line", { class: "axis", x1: x, x2: x, y1: inner.bottom, y2: inner.bottom + 4 }),
    svg("text", { class: "tick", x, y: inner.bottom + 16, "text-anchor": anchor }, text));

  // Bars side by side, each stacked by state. `bins`: {label, counts, total, hint, pick}.
  R.bars = (picture, width, height, { bins, name, marks = [], labels }) => {
    const most = Math.max(1, ...bins.map((bin) => bin.total));
    const ticks = R.ticks(0, most, 4).filter(Number.isInteger);
    const top = Math.max(most, ticks[ticks.length - 1] || 1);
    const inner = R.frame(picture, width, height, {
      top, ticks, tickText: R.count, name, above: marks.some((mark) => mark.text) ? 14 : 0,
    });
    const step = inner.width / bins.length;
    const gap = bins.length > 30 ? 1 : bins.length > 14 ? 2 : Math.min(12, step * 0.22);
    const thick = Math.max(1, Math.min(step - gap, 72));
    bins.forEach((bin, index) => {
      const x = inner.left + step * index + (step - thick) / 2;
      const group = svg("g", { class: bin.pick ? "bar pick" : "bar" },
        svg("rect", { class: "hit", x: inner.left + step * index, y: inner.top, width: step, height: inner.height }));
      let y = inner.bottom;
      for (const state of R.all.states) {
        const count = bin.counts[state] || 0;
        if (!count) continue;
        const tall = Math.max((count / top) * inner.height, 1);
        y -= tall;
        group.append(svg("rect", { class: "fill s-" + state, x, y, width: thick, height: tall }));
      }
      R.hint(group, bin.hint);
      if (bin.pick) group.addEventListener("click", bin.pick);
      picture.append(group);
    });
    // Where it is narrow, labels that would touch the one before are left out.
    let free = -Infinity;
    for (const [place, text, anchor = "middle"] of labels) {
      const x = inner.left + place * inner.width;
      const wide = text.length * 7;
      const left = anchor === "end" ? x - wide : anchor === "start" ? x : x - wide / 2;
      if (left < free) continue;
      free = left + wide + 8;
      R.xTick(picture, inner, x, text, anchor);
    }
    // Names stand above the bars, beside each other: one that would touch the one before moves on.
    free = -Infinity;
    for (const { place, text } of marks) {
      const x = inner.left + place * inner.width;
      picture.append(svg("line", { class: "marker", x1: x, x2: x, y1: inner.top - 4, y2: inner.bottom }));
      if (!text) continue;
      const wide = text.length * 7;
      const left = Math.max(free, Math.min(x - wide / 2, inner.right - wide));
      free = left + wide + 6;
      picture.append(svg("text", { class: "marker-text", x: left, y: inner.top - 8 }, text));
    }
  };
})();
